"""What is here and what fits: environment facts, checks, explanations, batch search."""
