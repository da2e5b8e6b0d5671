"""What preflight says of a checkpoint and a run, and what the load then does: they agree, errors included.

Nothing of the run is there when preflight answers: no process group, no model but the one that was saved, or one on the
meta device. The load is that of real engines.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run, ds_config
from preflight_answers import agree, change
from resume_jobs import Setup, config_of
from saves import UNIVERSAL, Saves, Universals

from ds_reshard.cli.main import main
from ds_reshard.operations import convert

pytestmark = pytest.mark.distributed

TWO = Model(groups=2, frozen=True, batchnorm=True)
TIED = Model(optimizer="amsgrad", tied=True)
PLAIN = Model()


@dataclass(frozen=True)
class Pair:
    """A checkpoint and a run: `loader` loads it, or `refused` is the error's class."""

    saved: Run
    run: Run
    loader: str = "ds_reshard"
    refused: str = ""
    model: Model = TWO
    other: Model | None = None
    flags: tuple[str, ...] = ()
    section: dict[str, Any] = field(default_factory=dict)
    universal: bool = False
    harm: Callable[[Path], None] | None = None
    tag: str | None = None
    strict: bool = True
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{self.saved}-to-{self.run}", self.name, *self.flags, *["not strict"] * (not self.strict)]
        return "-".join(filter(None, parts)) + (f"-{self.refused}" if self.refused else f"-{self.loader}")

    @property
    def coming(self) -> Run:
        more = {"ds_reshard": self.section} if self.section else {}
        return Run(self.run.stage, self.run.dp, self.run.dtype, self.run.options, {**self.run.config, **more})


def _copied(name: str, over: str) -> Callable[[Path], None]:
    return lambda folder: (
        next(folder.glob(f"*/{over}")).write_bytes(next(folder.glob(f"*/{name}")).read_bytes()) and None
    )


def _copied_without_names(folder: Path) -> None:
    """As a tool leaves them that loads, and saves into a stream."""
    for rank in (1, 0):
        stream = io.BytesIO()
        torch.save(torch.load(next(folder.glob(f"*/{OPTIM_0}")), weights_only=False), stream)
        next(folder.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")).write_bytes(stream.getvalue())


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(f"*/{name}")).unlink()


ROUND, ALIGNED = {"round_robin_gradients": True}, {"parameter_alignment": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
AS_SAVED = {"reshard": {"unchanged": "deepspeed"}}
MODEL_0 = "*mp_rank_00_model_states.pt"
OPTIM_0, OPTIM_1 = (f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
PAIRS = [
    # every stage into every other, another number of ranks
    *(
        Pair(Run(a, 2), Run(b, 1 + n % 3), model=(TWO, TIED, PLAIN)[n % 3], name="pairs")
        for n, (a, b) in enumerate((a, b) for a in (1, 2, 3, "bf16", 0) for b in (1, 2, 3, "bf16", 0))
        if not (a == b and 1 + n % 3 == 2) and (a, b) != (0, 0)
    ),
    # the same layout, also where it is left to DeepSpeed, and what only looks the same
    *(Pair(Run(stage, 2), Run(stage, 2), model=TIED) for stage in (1, 2, 3, "bf16", 0)),
    Pair(Run(0, 2), Run(0, 3), model=TIED),
    *(
        Pair(Run(stage, 2), Run(stage, 2), "DeepSpeed", model=TIED, section=AS_SAVED, name="left")
        for stage in (1, 2, 3, "bf16", 0)
    ),
    Pair(Run(0, 2), Run(0, 3), "DeepSpeed", model=TIED, section=AS_SAVED, name="left"),
    Pair(Run(2, 2), Run(2, 2), section={"reshard": {"verify": "fingerprint"}}, name="proved"),
    Pair(Run(2, 2), Run(2, 2), "DeepSpeed", section={"enabled": False}, name="disabled"),
    Pair(Run(2, 2, options=ROUND), Run(2, 2)),
    Pair(Run(2, 2), Run(2, 2, options=ROUND)),
    Pair(Run(2, 2, options=ROUND), Run(2, 2, options=ROUND), "DeepSpeed", section=AS_SAVED, name="left"),
    Pair(Run(1, 3, options=ROUND), Run(2, 2, options=ROUND)),
    Pair(Run(1, 2), Run(1, 2, options=ALIGNED)),
    Pair(Run(1, 2, options=ALIGNED), Run(1, 2, options=ALIGNED), "DeepSpeed", section=AS_SAVED, name="left"),
    Pair(Run(1, 2, options={"elastic_checkpoint": True}), Run(1, 2)),
    Pair(Run(3, 2, options={"sub_group_size": 60}), Run(3, 2)),
    Pair(Run(3, 2, options={"sub_group_size": 60}), Run(3, 2, options={"sub_group_size": 60})),
    Pair(Run(2, 2, options=OFFLOAD), Run(3, 3, options=OFFLOAD)),
    # another precision
    Pair(Run(2, 2), Run(2, 2, dtype="fp32"), model=PLAIN),
    Pair(Run(1, 2, dtype="fp32"), Run(3, 1), model=PLAIN),
    Pair(Run(3, 2, dtype="fp32"), Run(3, 2, dtype="fp32"), model=PLAIN),
    # the resume policy
    *(
        Pair(Run(2, 2), Run(1, 1 + n % 2), flags=(flag,), model=PLAIN)
        for n, flag in enumerate(("--override-opt-param-scheduler", "--no-load-lr-state", "--no-load-optim"))
    ),
    Pair(Run(2, 2), Run(2, 2), flags=("--override-opt-param-scheduler",), model=PLAIN),
    Pair(Run(2, 2), Run(2, 2), flags=("--load-masters-only",), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), flags=("--override-optim-hparams", "betas,eps"), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), flags=("--finetune",), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), flags=("--reset-iteration",), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), refused="ConfigError", flags=("--reset-dataloader",), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), refused="ConfigError", flags=("--override-optim-hparams", "nothing"), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), refused="UnsupportedLayout", flags=("--strict-opt-param-scheduler",), model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), section={"resume": {"scheduler": "override"}}, model=PLAIN, name="json"),
    Pair(Run(2, 2), Run(1, 1), refused="ConfigError", section={"resume": {"scheduler": "mine"}}, model=PLAIN),
    Pair(Run(2, 2), Run(1, 1), refused="ConfigError", section={"reshard": {"thread": 2}}, model=PLAIN),
    # another model
    Pair(Run(2, 2), Run(1, 1), refused="ModelMismatch", model=PLAIN, other=Model(extra=True)),
    Pair(Run(2, 2), Run(2, 2), model=PLAIN, other=PLAIN, name="its own model"),
    Pair(Run(3, 2), Run(3, 1), refused="ModelMismatch", model=PLAIN, other=Model(frozen=True)),
    Pair(Run(2, 2), Run(1, 1), refused="ModelMismatch", model=PLAIN, other=Model(optimizer="sgd")),
    Pair(Run(2, 2), Run(1, 1), refused="ParamGroupMismatch", model=TWO, other=Model(frozen=True, batchnorm=True)),
    # a model with fewer or more tensors than were saved, by load_module_strict
    *(
        Pair(saved, Run(stage, 1), refused="ModelMismatch" * strict, model=one, other=other, strict=strict, name=name)
        for saved, stage in ((Run(2, 2), 1), (Run(3, 2), 3))
        for name, one, other in (("fewer", Model(frozen=True), PLAIN), ("more", PLAIN, Model(frozen=True)))
        for strict in (True, False)
    ),
    # damaged, incomplete or mixed
    Pair(Run(2, 2), Run(1, 1), refused="CheckpointDamaged", harm=change(OPTIM_1), name="cut"),
    Pair(Run(2, 2), Run(2, 2), refused="CheckpointDamaged", harm=change(OPTIM_1), name="cut"),
    Pair(Run(3, 2), Run(2, 3), refused="CheckpointDamaged", harm=change(MODEL_0), name="cut"),
    Pair(Run(2, 2), Run(1, 3), refused="CheckpointDamaged", harm=_drop(OPTIM_1), name="incomplete"),
    Pair(Run(2, 2), Run(1, 3), refused="CheckpointNotFound", tag="nothing", name="tag"),
    Pair(Run(2, 2), Run(1, 1), harm=change(OPTIM_1), flags=("--no-load-optim",), model=PLAIN, name="unread"),
    Pair(Run(1, 2), Run(1, 3), refused="CheckpointDamaged", harm=_copied(OPTIM_0, OPTIM_1), name="copied"),
    Pair(Run(3, 2), Run(3, 2), refused="CheckpointDamaged", harm=_copied_without_names, name="copied"),
    # universal checkpoints
    Pair(Run(2, 2), Run(1, 3), universal=True, model=PLAIN, name="universal"),
    Pair(Run(2, 2), Run(3, 2, config=UNIVERSAL), universal=True, model=PLAIN, name="universal"),
    Pair(Run(2, 2), Run(2, 2, config=UNIVERSAL), universal=True, model=PLAIN, name="universal"),
    # a JSON that DeepSpeed refuses
    Pair(Run(2, 2), Run(2, 2, config={"train_batch_size": 13}), refused="ConfigError", model=PLAIN, name="batch"),
    Pair(Run(2, 2), Run(2, 2, options={"stage3": 1}), refused="ConfigError", model=PLAIN, name="key"),
    Pair(Run(2, 2), Run("bf16", 1, options={"offload_optimizer": {"device": "none"}}), model=PLAIN, name="none"),
    # an optimizer and a scheduler of the JSON
    Pair(Run(2, 2), Run(1, 1), section={"resume": {"scheduler": "reset"}}, model=PLAIN, name="json"),
]


def _folder(pair: Pair, saves: Saves, universals: Universals, tmp_path: Path) -> Path:
    folder, _ = (universals if pair.universal else saves)(pair.saved, pair.model)
    if pair.harm is None:
        return folder
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    pair.harm(copy)
    return copy


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_preflight_says_what_the_load_does(
    worlds: Any, saves: Saves, universals: Universals, foreseen: Any, tmp_path: Path, pair: Pair
) -> None:
    """Who loads, or which errors of which files; and the table of values to the last row."""
    folder = _folder(pair, saves, universals, tmp_path)
    said = _forecast(foreseen, pair, folder)
    real = worlds[pair.run.dp].run(
        "preflight_jobs.outcome",
        run=pair.coming,
        model=pair.other or pair.model,
        folder=str(folder),
        tag=pair.tag,
        flags=pair.flags,
        strict=pair.strict,
    )[0]
    assert (said.report is None) is (bool(pair.refused) or pair.section == {"enabled": False})
    agree(said, real, pair.loader, pair.refused, whole="elastic_checkpoint" not in pair.saved.options)


def _forecast(foreseen: Any, pair: Pair, folder: Path) -> Any:
    import argparse

    from ds_reshard.resume import policy_sources

    model = None
    if pair.other is not None:
        import jobs

        def model() -> Any:
            net = jobs.Net(pair.other)
            return net, jobs._optimizer(pair.other, jobs._groups(net, pair.other))

    policy_sources.forget()
    try:
        if pair.flags:
            parser = argparse.ArgumentParser()
            dests, adopted = policy_sources.define(parser)
            policy_sources.ask(policy_sources.given(parser.parse_args(list(pair.flags)), dests, adopted=adopted))
        run = {"config": ds_config(pair.coming), "world": pair.run.dp, "model": model}
        coming = foreseen.PlannedRun(**run, load_module_strict=pair.strict)
        return foreseen.forecast(str(folder), coming, tag=pair.tag)
    finally:
        policy_sources.forget()


WARMUP = Setup(json=True, groups=1, scheduler=("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 8}))
COSINE = Setup(json=True, groups=1, scheduler=("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 20}))
ALONE = Setup(json=True, groups=1)
TORCH = Setup(groups=1, scheduler=("CosineAnnealingLR", {"T_max": 40}))
NEW = {"lr": 0.5, "weight_decay": 0.7, "eps": 1e-6}
OF_JSON = [
    # saved, what changes, the loader or the error; the optimizer and the schedule are the JSON's, all values are known
    (WARMUP, {"run": Run(2, 2)}, "ds_reshard", ""),
    (WARMUP, {**NEW, "scheduler": ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 8})}, "ds_reshard", ""),
    *(
        (saved, {**NEW, "run": run, "policy": {"scheduler": policy}}, "ds_reshard", "")
        for saved in (WARMUP, COSINE, ALONE)
        for run, policy in ((Run(3, 2), "override"), (Run(2, 1), "checkpoint"), (Run(1, 2), "reset"))
    ),
    (COSINE, {**NEW, "policy": {"scheduler": "override"}}, "ds_reshard", ""),
    (COSINE, {**NEW, "policy": {"scheduler": "strict"}}, "", "ScheduleMismatch"),
    (COSINE, {"policy": {"scheduler": "strict"}}, "ds_reshard", ""),
    (ALONE, {**NEW, "policy": {"optimizer": "skip"}}, "ds_reshard", ""),
    (ALONE, {**NEW, "policy": {"hyperparameters": ["lr", "eps"]}}, "ds_reshard", ""),
    (WARMUP, {"policy": {"hyperparameters": ["lr"]}}, "", "ConfigError"),
    (ALONE, {"scheduler": WARMUP.scheduler}, "", "ModelMismatch"),
    (TORCH, {"json": True, "scheduler": WARMUP.scheduler}, "", "ModelMismatch"),
    (WARMUP, {"scheduler": ("WarmupLR", {"warm_up": 3})}, "", "ConfigError"),
    (ALONE, {"scheduler": ("StepLR", {"step_size": 3})}, "", "ConfigError"),
    *(
        (ALONE, {"run": Run(2, 1, config={"optimizer": {"type": kind, "params": params}})}, loader, refused)
        for kind, params, loader, refused in (
            ("Adam", {"torch_adam": True, "adam_w_mode": False, "lr": 0.01, "weight_decay": 0.1}, "ds_reshard", ""),
            ("AdamW", {"torch_adam": True, "amsgrad": True}, "", "ModelMismatch"),
            ("RMSprop", {"lr": 0.5}, "", "ModelMismatch"),
            ("NAdam", {"lr": 0.5}, "", "ModelMismatch"),
            ("SGD", {"lr": 0.5}, "", "ModelMismatch"),
            ("Nothing", {"lr": 0.5}, "", "ConfigError"),
            ("AdamW", {"torch_adam": True, "learning_rate": 0.5}, "", "ConfigError"),
        )
    ),
]


@pytest.mark.parametrize(("saved", "changed", "loader", "refused"), OF_JSON, ids=lambda value: str(value)[:90])
def test_values_of_a_json_are_foreseen(
    worlds: Any, kept: Any, foreseen: Any, saved: Setup, changed: dict[str, Any], loader: str, refused: str
) -> None:
    """Rates, decay and position of the first update, to the last row: nothing is the script's."""
    folder, _ = kept(saved.but(run=Run(1, 1)))
    coming = saved.but(**{"run": Run(1, 1), **changed})
    said = foreseen.forecast(str(folder), foreseen.PlannedRun(config=config_of(coming), world=coming.run.dp))
    real = worlds[coming.run.dp].run("preflight_jobs.outcome", run=coming, folder=str(folder))[0]
    agree(said, real, loader, refused)
    if said.report is not None:
        assert not any("the script's" in (row.this_run, row.used) for row in said.report.rows if "lr" in row.name)


FORMATS = [
    *((kind, Run(stage, 2), "") for kind in ("dcp", "accelerate", "pytorch") for stage in (1, 3)),
    ("dcp", Run("bf16", 1), ""),
    ("safetensors", Run(2, 2), "UnsupportedLayout"),
]


@pytest.mark.parametrize(("kind", "run", "refused"), FORMATS, ids=str)
def test_folders_of_other_formats(
    worlds: Any, saves: Saves, foreseen: Any, tmp_path_factory: Any, kind: str, run: Run, refused: str
) -> None:
    """They load as DeepSpeed would have saved them, or what they do not hold is named."""
    model = Model(groups=2, scheduler=False)
    source, _ = saves(Run(2, 2), model)
    folder = source.parent / f"{source.name}-{kind}"
    if not folder.exists():
        convert(str(source), str(folder), to=kind)
    said = foreseen.forecast(str(folder), foreseen.PlannedRun(config=ds_config(run), world=run.dp))
    real = worlds[run.dp].run("preflight_jobs.outcome", run=run, model=model, folder=str(folder))[0]
    agree(said, real, "ds_reshard", refused)


@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize("exclude", (False, True))
def test_entries_that_their_module_does_not_load(
    worlds: Any, foreseen: Any, tmp_path: Path, exclude: bool, strict: bool
) -> None:
    """The scales of a quantized weight (QLoRA): a strict load refuses them. Without frozen weights the note says so."""
    worlds[2].run("loading_modules.save_adapted", run=Run(2, 2), folder=str(tmp_path), exclude=exclude)
    run = foreseen.PlannedRun(config=ds_config(Run(1, 1)), world=1, load_module_strict=strict)
    said = foreseen.forecast(str(tmp_path), run)
    (real,) = worlds[1].run(
        "loading_modules.load_adapted", run=Run(1, 1), folder=str(tmp_path), scale=2.0, strict=strict
    )
    assert ("error" in real) is strict
    assert said.loads is (exclude or not strict)
    assert all(fault.line() in real["text"] for fault in said.faults)
    hints = [note for note in said.notes if "load_module_strict=False" in note]
    assert len(hints) == strict, said.notes


@pytest.mark.acts
@pytest.mark.parametrize("run", [Run(1, 1), Run(2, 2)], ids=str)
def test_a_checkpoint_that_acts_is_refused_before_the_job(
    worlds: Any, saves: Saves, foreseen: Any, tmp_path: Path, run: Run
) -> None:
    """Whoever would load it: an entry of the model file that calls the shell."""
    folder = tmp_path / "copy"
    shutil.copytree(saves(Run(2, 2), PLAIN)[0], folder)
    (path,) = folder.glob("*/mp_rank_00_model_states.pt")
    entries = torch.load(path, weights_only=False)
    torch.save({**entries, "note": _Acts()}, path)
    said = foreseen.forecast(str(folder), foreseen.PlannedRun(config=ds_config(run), world=run.dp))
    real = worlds[run.dp].run("preflight_jobs.outcome", run=run, model=PLAIN, folder=str(folder))[0]
    agree(said, real, "", "UnsafePickle")


class _Acts:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_the_command_answers_in_its_first_line(
    saves: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str], foreseen: Any
) -> None:
    """0 and yes, 1 and no, with the table of values and the cost; nothing else on stdout."""
    folder, _ = saves(Run(2, 2), PLAIN)
    config = {"train_batch_size": 24, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = ["preflight", str(folder), "--config", str(tmp_path / "ds.json"), "--nodes", "2", "--world"]
    assert main([*command, "8"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "yes: ds_reshard loads ZeRO 2, dp=2 as ZeRO 3, dp=8"
    assert any(line.startswith("group 0: lr\t") for line in shown) and any(
        "a node of 4 ranks reads" in s for s in shown
    )
    assert main([*command, "7"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("no: ") and "cannot be divided among 7 data-parallel ranks" in shown[0]
    assert main([*command, "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["loads"] and [cost["rank"] for cost in told["cost"]["ranks"]] == [0, 1, 2, 3, 7]
    assert told["batch"]["train_batch_size"] == {"checkpoint": 12, "run": 24}
    harmed = Path(shutil.copytree(folder, tmp_path / "harmed"))
    path = next(harmed.glob(f"*/{OPTIM_1}"))
    with zipfile.ZipFile(path) as stored:  # a bit of a tensor: the file opens
        where = max((one for one in stored.infolist() if "/data/" in one.filename), key=lambda one: one.file_size)
    content = bytearray(path.read_bytes())
    content[where.header_offset + 200] ^= 1
    path.write_bytes(content)
    command[1] = str(harmed)
    assert main([*command, "8"]) == 0 and main([*command, "8", "--deep"]) == 1
    assert f"{path}: " in capsys.readouterr().out.split("\nno: ")[1]
    held, buffers = told["cost"]["ranks"][0], told["cost"]["buffer_nbytes"]
    assert held["host_nbytes"] == buffers > 0 and told["cost"]["node_files"] == 3
    assert held["device_nbytes"] == held["optimizer_nbytes"] + held["weights_nbytes"] + buffers


def test_the_command_answers_for_a_load_that_is_not_strict(worlds: Any, tmp_path: Path, capsys: Any) -> None:
    """1, with a note that says what to ask; then 0."""
    worlds[2].run("loading_modules.save_adapted", run=Run(2, 2), folder=str(tmp_path), exclude=False)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 2}}))
    command = ["preflight", str(tmp_path), "--config", str(tmp_path / "ds.json"), "--world", "1"]
    assert main(command) == 1 and "--no-load-module-strict" in capsys.readouterr().out
    assert main([*command, "--no-load-module-strict"]) == 0 and "strict" not in capsys.readouterr().out


def test_moments_that_an_offload_in_part_loses(saves: Saves, foreseen: Any) -> None:
    """Said for a job with GPUs, whose device is another than the host."""
    folder, _ = saves(Run(2, 2), PLAIN)
    for ratio, loads in ((0.5, False), (1.0, True)):
        options = {"offload_optimizer": {"device": "cpu", "ratio": ratio}, "sub_group_size": 20}
        said = foreseen.forecast(
            str(folder), foreseen.PlannedRun(config=ds_config(Run(3, 2, options=options)), world=2)
        )
        assert [fault.where for fault in said.faults] == ["zero_optimization.offload_optimizer.ratio"] * (not loads)


@pytest.mark.parametrize("run", [Run(2, 2, options=OFFLOAD), Run(2, 2)], ids=str)
def test_memory_of_what_is_offloaded_and_of_what_deepspeed_reads(saves: Saves, foreseen: Any, run: Run) -> None:
    """The optimizer's is the host's where it is offloaded; files that DeepSpeed reads are there whole, beside it."""
    config = {**ds_config(run), "ds_reshard": AS_SAVED}
    said = foreseen.forecast(str(saves(Run(2, 2), PLAIN)[0]), foreseen.PlannedRun(config=config, world=2))
    (cost, _) = said.costs
    held = cost.optimizer_nbytes * (run.options == OFFLOAD)
    assert said.loader == "DeepSpeed" and said.buffer_nbytes == 0
    assert said.memory(cost) == (held + cost.read_nbytes, cost.optimizer_nbytes - held + cost.weights_nbytes)


def test_flags_of_the_script_are_the_policy(saves: Saves, tmp_path: Path, capsys: Any, foreseen: Any) -> None:
    """What follows -- is the script's command line: the resume flags in it hold, the others are its own."""
    folder, _ = saves(Run(2, 2), PLAIN)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    command = ["preflight", str(folder), "--config", str(tmp_path / "ds.json"), "--world", "4", "--json"]
    assert main([*command, "--", "--epochs", "3", "--reset-iteration"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["report"]["rows"]}
    assert (rows["iteration"]["used"], rows["iteration"]["because"]) == (0, "--reset-iteration")
    assert main(command) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["report"]["rows"]}
    assert rows["iteration"]["used"] == 3
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "ds_reshard": {"resume": {"rng": True}}})
    )
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("acts only in a run with the hooks" in note for note in told["notes"])
    assert not any("the formulas are those of" in note for note in told["rates"]["notes"]), "DeepSpeed 0.19.8 is here"
    auto = {"lr": "auto", "betas": "auto", "weight_decay": "auto", "torch_adam": True}
    asked = {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": auto}}
    (tmp_path / "ds.json").write_text(json.dumps({**asked, "bf16": {"enabled": "auto"}}))
    trainers = ("--per_device_train_batch_size=3", "--adam_beta1", "0.5", "--weight_decay", "0.7", "--bf16", "True")
    assert main([*command, "--", *trainers]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row["this_run"] for row in told["report"]["rows"]}
    assert (rows["global batch size"], rows["group 0: betas"], rows["group 0: weight_decay"]) == (12, [0.5, 0.999], 0.7)
    assert any(
        note.startswith('settings that are "auto" take') and note.endswith(": optimizer.params.lr")
        for note in told["notes"]
    )


def _of_gpu() -> Any:
    return torch.nn.Linear(3, 3, device="cuda")


def _of_others() -> Any:
    return torch.nn.Linear(3, 3), torch.optim.SGD(torch.nn.Linear(3, 3).parameters())


def _ends() -> Any:
    print("a factory may say what it likes")
    sys.exit(3)


def _no_module() -> Any:
    return {}


BAD = [
    # what is asked, the status, and what is said
    ([], 2, "--config FILE"),
    (["--", "--num-layers", "24"], 2, "run this in the job's own environment"),
    (["--config", "none.json"], 2, "cannot be read"),
    (["--config", "megatron.yaml"], 2, "is not JSON"),
    (["--config", "bert.json"], 1, "train_batch_size or train_micro_batch_size_per_gpu"),
    (["--config", "bert.json"], 1, "the first key of this file is 'architectures'"),
    (["--config", "ds.json", "--tp", "3"], 1, "4 ranks cannot be divided into tp=3"),
    (["--config", "ds.json", "--nodes", "9"], 1, "9 nodes have 4 ranks"),
    (["--config", "ds.json", "--pp", "2"], 1, "preflight cannot predict"),
    (["--config", "ds.json", "--tag", "none"], 1, "has no tag 'none'"),
    (["--config", "ds.json", "--model", "nothing"], 2, "is not module:factory"),
    (["--config", "ds.json", "--model", "no_such_module:build"], 1, "No module named 'no_such_module'"),
    (["--config", "ds.json", "--model", "test_preflight:_of_gpu"], 1, "--model: fails with"),
    (["--config", "ds.json", "--model", "test_preflight:_no_module"], 1, "gives dict, and no torch.nn.Module"),
    (["--config", "ds.json", "--model", "beside:build"], 1, "gives str, and no torch.nn.Module"),
    (["--config", "ds.json", "--model", "test_preflight:_of_others"], 1, "of none of the module's parameters"),
    (["--config", "ds.json", "--model", "test_preflight:_ends"], 1, "--model: fails with SystemExit"),
]


@pytest.mark.parametrize(("asked", "status", "said"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_be_asked_is_named(
    saves: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    foreseen: Any,
    asked: list[str],
    status: int,
    said: str,
) -> None:
    """Never a traceback; where a model cannot be built the rest is answered all the same."""
    folder, _ = saves(Run(2, 2), PLAIN)
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    Path("bert.json").write_text(json.dumps({"architectures": ["BertModel"], "hidden_size": 768}))
    Path("megatron.yaml").write_text("language_model:\n  num_layers: 24\n")
    Path("beside.py").write_text("build = str\n")
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert main(["preflight", str(folder), "--world", "4", *asked]) == status
    shown = capsys.readouterr()
    first = " ".join((shown.err if status == 2 else shown.out).splitlines()[:2])
    assert said in first and "a factory may" not in shown.out
    assert ("iteration\t3" in shown.out) is ("--model" in asked and status == 1)


def test_a_folder_that_is_none_or_cannot_be_read(tmp_path: Path, capsys: Any, foreseen: Any, monkeypatch: Any) -> None:
    """It is named, in the verdict."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8}))
    Path("empty").mkdir()
    command = ["--world", "4", "--config", "ds.json"]
    for folder in ("empty", "nowhere"):
        assert main(["preflight", folder, *command]) == 1
        assert capsys.readouterr().out.startswith(f"no: ZeRO 0, dp=4: {folder}: ")
        Path("auto.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto"}))
        assert main(["preflight", folder, "--world", "4", "--config", "auto.json"]) == 1
        shown = capsys.readouterr().out
        assert shown.startswith(f"no: dp=4: {folder}: ") and "DeepSpeed refuses it" not in shown
        assert 'settings that are "auto" are not known' in shown and "the saving run's value" not in shown
        Path("auto.json").write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": "x"}}))
        assert main(["preflight", folder, "--world", "4", "--config", "auto.json"]) == 1
        assert "DeepSpeed refuses it" in capsys.readouterr().out  # for more than what is "auto"
    Path("out/checkpoint-4").mkdir(parents=True)  # as Hugging Face's Trainer has them
    Path("out/checkpoint-4/latest").write_text("global_step4")
    assert main(["preflight", "out", *command]) == 1
    assert "to mend: give one: out/checkpoint-4" in capsys.readouterr().out
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if str(path).endswith("empty"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["preflight", "empty", *command]) == 1
    assert "Permission denied" in capsys.readouterr().out.splitlines()[0]


def test_the_scripts_for_slurm(saves: Saves, tmp_path: Path, interpreter: str) -> None:
    """As the page has them: `srun` is reached where the load will go well, and not elsewhere; a job waits for one."""
    page = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
    script, chained = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    stand_ins = {
        "ds-reshard": f'exec {interpreter} -m ds_reshard "$@"',
        "srun": 'echo "srun $*"',
        "sbatch": 'if [ "$1" = --parsable ]; then sh -c "$4" >first && echo 17; else echo "sbatch $*"; fi',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    config = {"train_batch_size": 384, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    job = {"CHECKPOINTS": str(saves(Run(2, 2), PLAIN)[0]), "SLURM_NNODES": "2", "RESUME_FLAGS": "--reset-iteration"}

    def run(text: str, **more: str) -> tuple[int, str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **more}
        command = ["bash", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout

    for ranks, status in (("8", 0), ("7", 1)):
        ended, said = run(script, SLURM_NTASKS=ranks)
        assert ended == status and said.startswith("no: " if status else "yes: ")
        assert ("srun python train.py" in said) is (status == 0)
    ended, said = run(chained)
    assert ended == 0 and said.startswith("sbatch --dependency=afterok:17 ")
    assert (tmp_path / "first").read_text().startswith("yes: ds_reshard loads ZeRO 2, dp=2 as ZeRO 3, dp=384")
