"""Run a script whose every `engine.step` takes a while, until a file is there: slowly.py SECONDS FILE SCRIPT ...

It logs what each load reports.
"""

import logging
import runpy
import sys
import time
from pathlib import Path

import deepspeed
from deepspeed import DeepSpeedEngine

seconds, hurry, sys.argv = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
step = DeepSpeedEngine.step


def slow_step(*args: object, **kwargs: object) -> object:
    time.sleep(0 if hurry.exists() else seconds)
    return step(*args, **kwargs)


DeepSpeedEngine.step = slow_step
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and these ranks do not need it
logging.getLogger("ds_reshard").addHandler(logging.StreamHandler())
logging.getLogger("ds_reshard").setLevel(logging.INFO)
runpy.run_path(sys.argv[0], run_name="__main__")
