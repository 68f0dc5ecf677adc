"""Language models: causal models of transformers, on prompts and completions."""
