"""What a checkpoint is, in plain values: no torch, no files, no processes."""
