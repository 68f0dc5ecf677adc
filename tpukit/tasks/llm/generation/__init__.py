"""Text generation with a static KV cache: greedy, sampling, beam search."""
