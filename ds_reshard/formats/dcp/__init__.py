"""Folders of torch.distributed.checkpoint: FSDP2, accelerate's sharded FSDP, torchtitan."""
