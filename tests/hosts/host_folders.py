"""Puts the folders of tests/hosts on the path, of this process and of those that it starts."""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
FOLDERS = [str(_HERE), *(str(_HERE / name) for name in ("accelerate", "deepspeed", "fsdp", "nanotron_runs", "tools"))]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*FOLDERS, os.environ.get("PYTHONPATH", ""))))
