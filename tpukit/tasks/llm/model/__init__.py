"""GPT-2, LoRA adapters, and weights from and to other formats."""
