"""Where a run stands in its steps and data, as `metas` of checkpoint_metadata.json.

`TrainingMetadata` (serialize/metadata.py, commit 2411b02) refuses samples and tokens that are not the sums of those of
its data stages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.nanotron.content import METADATA
from ds_reshard.formats.nanotron.metadata import Metadata
from ds_reshard.model.content import Content

_SEQUENCE_LENGTH = 4096  # DataStageMetadata.__post_init__


def position_of(content: Content, like: Metadata) -> tuple[Mapping[str, object], list[Fault]]:
    """The saving run's own where it was one of nanotron; else its samples in the one data stage that `like` has."""
    own = content.entries.get(METADATA)
    if _is_text(own) and isinstance(own, dict) and own.get("last_train_step") == content.steps:
        return own, []
    if content.steps is None or content.samples is None:
        return {}, [_unknown(content, "says no number of steps and samples", "global_steps and global_samples")]
    metas = like.entries.get("metas")
    shown: Mapping[str, object] = metas if isinstance(metas, dict) else {}
    counts: dict[str, object] = {"consumed_train_samples": content.samples, "last_train_step": content.steps}
    stages = shown.get("data_stages")
    if not isinstance(stages, list):
        return {**shown, **counts}, []
    stage = stages[0] if len(stages) == 1 else None
    folders = stage.get("consumed_tokens_per_dataset_folder") or {} if isinstance(stage, dict) else None
    if not isinstance(stage, dict) or not isinstance(folders, dict) or len(folders) > 1:
        what = "does not say what it has consumed of which data, of which --like has several stages or folders"
        return {}, [_unknown(content, what, "a --like of one data stage and folder")]
    tokens = content.samples * int(stage.get("sequence_length") or _SEQUENCE_LENGTH)
    consumed = dict.fromkeys(folders, tokens)
    stage = {**stage, "consumed_train_samples": content.samples, "consumed_tokens_per_dataset_folder": consumed}
    total = tokens if consumed else None
    return {**shown, **counts, "consumed_tokens_total": total, "last_stage_idx": 0, "data_stages": [stage]}, []


def _is_text(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _unknown(content: Content, what: str, expected: str) -> Fault:
    return UnsupportedLayout.fault(
        content.folder, what, expected, "others", mend="name a checkpoint of a run with one data stage: --like DIR"
    )
