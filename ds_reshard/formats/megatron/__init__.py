"""Checkpoints of Megatron-LM: schedule, param groups, and the tensors of the formats torch and torch_dist."""
