"""The command that an error gives to mend it: it is run on the same folder, and mends it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cases import Model, Run
from saves import Saves

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
