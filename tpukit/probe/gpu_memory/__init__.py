"""Memory that a training step takes on a GPU, from a trace over fake tensors: nothing executes."""
