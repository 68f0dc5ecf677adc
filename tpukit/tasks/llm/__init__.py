"""GPT-2 dialogue summarisation."""
