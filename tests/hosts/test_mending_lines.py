"""The command that an error gives to mend it: it is run on the same folder, and mends it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run, ds_config
from foretold import change
from saves import Saves
from strangers import Stranger

from ds_reshard.cli.main import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ZERO2, NADAM, FP32 = (Run(2, 2), Model(groups=2)), (Run(1, 2), Model(optimizer="nadam")), (Run(1, 2, "fp32"), Model())
OUT = "convert {source} {out} --to "
ROWS = [
    (ZERO2, OUT + "zero4", "(choose from 'zero1', 'zero2',", OUT + "zero2"),
    (ZERO2, OUT + "universal --dp 2", "--dp: --to universal writes whole tensors", OUT + "universal"),
    (ZERO2, OUT + "zero2 --sub-group-size 9", "or --to zero3", OUT + "zero3 --sub-group-size 9"),
    (ZERO2, OUT + "zero1 --dtype float32", "--to safetensors", OUT + "safetensors --dtype float32"),
    (ZERO2, OUT + "zero3 --threads 4 --memory 2", "--memory 4,", OUT + "zero3 --threads 4 --memory 4"),
    (ZERO2, OUT + "zero3 --threads 4 --memory 2", "or --threads 2", OUT + "zero3 --threads 2 --memory 2"),
    (ZERO2, "convert {source} {folder}/no/out --to zero3", "mkdir -p {folder}/no", OUT + "zero3"),
    (
        ZERO2,
        "convert {source} {folder}/there --to zero3",
        "--force",
        "convert {source} {folder}/there --to zero3 --force",
    ),
    (ZERO2, "convert {source} {source}/out --to zero3", "name a folder apart", OUT + "zero3"),
    (ZERO2, OUT + "zero3 --zero-stage 1", "--to nanotron", OUT + "zero3"),
    (NADAM, OUT + "universal", "--to zero1", OUT + "zero1"),
    (FP32, OUT + "bf16", "--to zero1", OUT + "zero1"),
    (ZERO2, "inspect {source} --tag none", "global_step3", "inspect {source} --tag global_step3"),
]


@pytest.mark.parametrize(("saved", "faulty", "line", "mended"), ROWS, ids=[f"{row[1]}: {row[2]}" for row in ROWS])
def test_the_command_of_an_error_mends_it(
    saves: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: tuple[Run, Model],
    faulty: str,
    line: str,
    mended: str,
) -> None:
    folder, _ = saves(*saved)
    (tmp_path / "there").mkdir()
    filled = {"source": shutil.copytree(folder, tmp_path / "source"), "folder": tmp_path, "out": tmp_path / "out"}
    try:
        status = main([word.format(**filled) for word in faulty.split()])
    except SystemExit as ended:
        status = int(ended.code or 0)
    told = capsys.readouterr().err
    assert status != 0 and line.format(**filled) in " ".join(told.split()), told
    assert main([word.format(**filled) for word in mended.split()]) == 0, capsys.readouterr().err


Z1, Z3 = ds_config(Run(1, 1)), ds_config(Run(3, 1))
ADAMW = {**Z1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}}
WARMUP = {**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}}
OFFLOAD = {**Z1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
FORCED = {**OFFLOAD, "zero_force_ds_cpu_optimizer": True}
PLAIN, STATELESS = (Run(2, 2), Model()), (Run(2, 2), Model(scheduler=False))
SGD, OVERRIDE = "--model test_mending_lines:_sgd", "-- --override-opt-param-scheduler"
TRUST = "--trust strangers.Stranger"
COMING = [
    # what was saved, the JSON and the command line of the coming run, what the error says, and both as it says
    (PLAIN, Z1, "--world 7", "run on as many ranks as divide it (1)", Z1, "--world 1"),
    (PLAIN, Z1, "--world 1 --nodes 2", "give at most as many as ranks", Z1, "--world 1 --nodes 1"),
    (PLAIN, Z1, "--world 1 --tag none", "global_step3", Z1, "--world 1 --tag global_step3"),
    (PLAIN, Z1, "--world 1 --tag cut", "load another tag", Z1, "--world 1 --tag global_step3"),
    (PLAIN, Z1, "--world 1 --tag stranger", TRUST, Z1, f"--world 1 --tag stranger {TRUST}"),
    (PLAIN, Z1, "--world 1 -- --reset-dataloader", "leave out --reset-dataloader", Z1, "--world 1 --"),
    (PLAIN, Z1, f"--world 1 {SGD}", "load_optimizer_states=False", Z1, f"--world 1 {SGD} -- --no-load-optim"),
    (PLAIN, FORCED, "--world 1", '"zero_force_ds_cpu_optimizer": false', OFFLOAD, "--world 1"),
    (STATELESS, WARMUP, "--world 1", "--no-load-lr-state", WARMUP, "--world 1 -- --no-load-lr-state"),
    (
        STATELESS,
        ADAMW,
        "--world 1 -- --strict-opt-param-scheduler",
        "used with --override-opt-param-scheduler",
        ADAMW,
        f"--world 1 {OVERRIDE}",
    ),
    (
        PLAIN,
        WARMUP,
        "--world 1 -- --override-optim-hparams lr",
        "use --override-opt-param-scheduler (scheduler: override)",
        WARMUP,
        f"--world 1 {OVERRIDE}",
    ),
    *(
        (PLAIN, {**Z3, "zero_optimization": {"stage": 2, key: value}}, "--world 1", f"leave out {key}", Z3, "--world 1")
        for key, value in (("compute_grad_norm", False),)
    ),
]


def _sgd() -> Any:
    import jobs

    net = jobs.Net(Model())
    return net, torch.optim.SGD(jobs._groups(net, Model()), momentum=0.9)


@pytest.mark.acts
@pytest.mark.usefixtures("foreseen")
@pytest.mark.parametrize(
    ("saved", "config", "asked", "line", "mended", "again"), COMING, ids=[f"{row[2]}: {row[3]}" for row in COMING]
)
def test_what_mends_a_load_mends_it(
    saves: Saves,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: tuple[Run, Model],
    config: dict[str, Any],
    asked: str,
    line: str,
    mended: dict[str, Any],
    again: str,
) -> None:
    """Flags, keys of the JSON and tags that errors name: preflight, which agrees with the load, says yes with them."""
    folder, path = tmp_path / "saved", tmp_path / "ds.json"
    shutil.copytree(saves(*saved)[0], folder)
    for name in ("cut", "stranger"):
        shutil.copytree(folder / "global_step3", folder / name)
    change("*rank_1_mp_rank_00_optim_states.pt")(folder)  # the first of its tags: cut
    model = folder / "stranger" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(model, weights_only=False), "mine": Stranger(7)}, model)
    for status, what, words in ((1, config, asked), (0, mended, again)):
        path.write_text(json.dumps(what))
        ended = main(["preflight", str(folder), "--config", str(path), *words.split()])
        told = capsys.readouterr()
        assert ended == status or (status == 1 and ended == 2), told.out + told.err
        assert status == 0 or line in " ".join((told.out + told.err).split()), told.out + told.err
