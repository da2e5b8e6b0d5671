"""torch.distributed.checkpoint: its own interface of a storage (rung 1), so nothing is patched."""

from __future__ import annotations
