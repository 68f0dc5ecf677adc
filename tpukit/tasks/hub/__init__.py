"""Models of transformers and adapters of peft, for the tasks that train them."""

OTHER_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "spm.model",
               "sentencepiece.bpe.model")  # fmt: skip
"""Files of tokenizers without a tokenizer.json, which transformers converts."""
