"""Run a script whose every micro batch takes a while: slowly.py SECONDS SCRIPT ARGUMENTS ..."""

import runpy
import sys
import time

from deepspeed import DeepSpeedEngine

seconds, sys.argv = float(sys.argv[1]), sys.argv[2:]
step = DeepSpeedEngine.step


def slow_step(*args: object, **kwargs: object) -> object:
    time.sleep(seconds)
    return step(*args, **kwargs)


DeepSpeedEngine.step = slow_step
runpy.run_path(sys.argv[0], run_name="__main__")
