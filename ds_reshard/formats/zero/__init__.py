"""DeepSpeed ZeRO checkpoints: stages 0 to 3 and BF16_Optimizer, written by DeepSpeed 0.14 to 0.19."""
