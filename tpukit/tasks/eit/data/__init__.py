"""EIT samples: files, normalisation, data sets."""
