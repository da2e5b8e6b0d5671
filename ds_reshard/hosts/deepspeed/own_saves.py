"""Checkpoints that this very engine has saved: to load one again (the best one, at the end) is no resume.

Files are known by name, size and time, so that a folder that was renamed, or reached through `latest`, is known, and a
tag that somebody else wrote again is not.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from ds_reshard.hosts.deepspeed.look import latest_tag, tag_files
from ds_reshard.hosts.deepspeed.resumed import policy_of
from ds_reshard.hosts.deepspeed.settings import parse_settings
from ds_reshard.operations.ranks import attempt, rank

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Prints = frozenset[tuple[str, int, int]]

_SAVED: weakref.WeakKeyDictionary[DeepSpeedEngine, set[Prints]] = weakref.WeakKeyDictionary()


def note_save(engine: DeepSpeedEngine, save_dir: str, tag: object) -> None:
    """Rank 0: note what `save_checkpoint` has written, where a resume policy was asked for. Never raises."""
    if rank() == 0:
        attempt(
            lambda: _note(engine, Path(save_dir, str(tag) if tag is not None else f"global_step{engine.global_steps}"))
        )


def _note(engine: DeepSpeedEngine, folder: Path) -> None:
    settings = parse_settings(engine._config._param_dict)
    if not policy_of(engine, settings, module_only=False).is_default and (seen := _prints(folder)):
        _SAVED.setdefault(engine, set()).add(seen)


def saved_by(engine: DeepSpeedEngine, load_dir: str, tag: object, *, universal: bool) -> bool:
    """Rank 0: whether the files of a tag, or of the latest one, are those that this engine wrote.

    No resume policy is meant for them.
    """
    tag = tag if tag is not None else latest_tag(load_dir, *tag_files(universal=universal))
    if tag is None:
        return False
    seen = _prints(Path(load_dir, str(tag)))
    own = any(noted <= seen for noted in _SAVED.get(engine, ()))
    if own:
        logger.info("%s holds what this run has saved: it is loaded as it is, without the resume policy", load_dir)
    return own


def _prints(folder: Path) -> Prints:
    if not folder.is_dir():
        return frozenset()
    with os.scandir(folder) as scan:
        found = [(entry.name, entry.stat()) for entry in scan if entry.is_file()]
    return frozenset((name, status.st_size, status.st_mtime_ns) for name, status in found)
