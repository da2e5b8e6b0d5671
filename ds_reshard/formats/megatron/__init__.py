"""Checkpoints of Megatron-LM: what they say of schedule and param groups; tensors are left to Megatron."""
