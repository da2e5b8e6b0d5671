"""What preflight makes of "auto" in a JSON of Hugging Face's Trainer is what the Trainer itself makes of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from ds_reshard.cli.preflight_command import _values

AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
}
FLAGS = {
    "no warm-up": {"warmup_steps": "0", "max_steps": "10"},
    "a part": {"warmup_steps": "0.25", "max_steps": "10"},
    "a count": {"warmup_steps": "3", "max_steps": "10"},
    "without JSON's zero": {"weight_decay": ".1", "learning_rate": "1.e-3", "warmup_steps": ".5", "max_steps": "7"},
    "all": {
        "per_device_train_batch_size": "4",
        "gradient_accumulation_steps": "2",
        "max_grad_norm": "0.5",
        "adam_beta2": "0.95",
        "adam_epsilon": "1e-6",
        "warmup_steps": "1",
        "max_steps": "9",
    },
}


@pytest.mark.parametrize("case", FLAGS)
def test_the_trainer_fills_the_same(tmp_path: Path, case: str) -> None:
    """Its own arithmetic, from the same arguments."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    from ds_reshard.hosts.deepspeed.coming import fill_from_flags

    given = {name: float(value) if set(value) & set(".e") else int(value) for name, value in FLAGS[case].items()}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)
    try:
        theirs = HfTrainerDeepSpeedConfig(copy.deepcopy(AUTO))
        theirs.trainer_config_process(arguments)
        theirs.trainer_config_finalize(arguments, None, arguments.max_steps)
    finally:
        unset_hf_deepspeed_config()
    ours = fill_from_flags(AUTO, _values([f"--{name}={value}" for name, value in FLAGS[case].items()]))
    told = _flat(ours)
    assert {name: value for name, value in _flat(theirs.config).items() if told[name] != "auto"} == {
        name: value for name, value in told.items() if value != "auto"
    }
    assert all(told[name] != "auto" for name in ("scheduler.warmup_num_steps", "scheduler.total_num_steps"))


@pytest.mark.parametrize("flags", [["--warmup_steps", "0.1"], ["--warmup_steps", "0.1", "--max_steps", "-1"]], ids=str)
def test_what_follows_from_the_data_is_not_made_up(flags: list[str]) -> None:
    from ds_reshard.hosts.deepspeed.coming import fill_from_flags

    filled = fill_from_flags(AUTO, _values(flags))["scheduler"]
    assert filled == AUTO["scheduler"]


def _flat(config: Any) -> dict[str, Any]:
    """The values that are "auto" in the JSON, by section and name."""
    found = {name: config[name] for name in AUTO if AUTO[name] == "auto"}
    for section in ("optimizer", "scheduler"):
        found |= {f"{section}.{name}": config[section]["params"][name] for name in AUTO[section]["params"]}
    return found
