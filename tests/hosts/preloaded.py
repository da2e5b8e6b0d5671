"""What the server has imported of which the ranks of `worlds.py` and `fresh.py` are forked; it starts no thread."""

from __future__ import annotations

import functools
import gc
import os
from importlib import metadata

from devices import DEVICE, share_gloo_device

os.environ.update(
    OMP_NUM_THREADS="1", DS_ACCELERATOR=DEVICE, GLOO_SOCKET_IFNAME="lo", PYTORCH_NVML_BASED_CUDA_CHECK="1"
)

import accelerate.utils  # noqa: F401
import cpuinfo
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # is imported by the first engine, with torch._inductor
import fresh  # noqa: F401  # imports pytest
import fsdp_jobs  # noqa: F401
import jobs
from lifetimes import to_huge_pages
from package import import_with
from transformers import Trainer  # noqa: F401

os.fsync = lambda fd: None  # as in conftest.py
metadata.metadata = functools.cache(metadata.metadata)  # each Accelerator reads those of sixteen packages
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # for which each CPUAdam starts an interpreter
jobs.load_frameworks()
share_gloo_device()
import_with("deepspeed", "accelerate", "transformers", "torch", "fsdp", "dcp")
gc.freeze()  # the ranks collect garbage before each engine: what is imported would be most of what is looked at
gc.set_threshold(10_000)
to_huge_pages()
