"""A small Llama that Megatron-LM and the Hugging Face Trainer train on the same batches."""
