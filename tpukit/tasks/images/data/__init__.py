"""Images on disk: which there are, decoding, augmentation, a generated set."""
