"""Checkpoints of nanotron: names and rules on top of containers."""
