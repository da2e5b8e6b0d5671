"""What the server has imported of which the ranks of `worlds.py` and `fresh.py` are forked; it starts no thread.

Of `ds_reshard` what knows no framework is among it: the hosts and hooks are imported anew in each world.
"""

from __future__ import annotations

import gc
import os

from devices import DEVICE

os.environ.update(
    OMP_NUM_THREADS="1", DS_ACCELERATOR=DEVICE, GLOO_SOCKET_IFNAME="lo", PYTORCH_NVML_BASED_CUDA_CHECK="1"
)

import accelerate.utils  # noqa: F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # is imported by the first engine, with torch._inductor
import fsdp_jobs  # noqa: F401
import jobs
from transformers import Trainer  # noqa: F401

import ds_reshard.operations
import ds_reshard.resume.report  # noqa: F401  # with rich

os.fsync = lambda fd: None  # as in conftest.py
jobs.load_frameworks()
gc.freeze()  # the ranks collect garbage before each engine: what is imported would be most of what is looked at
