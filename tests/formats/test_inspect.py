"""`ds-reshard inspect`: what a checkpoint of real DeepSpeed tells, and that every fault of a broken one is found."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from sparse_archive import hole, write_sparse
from sparse_checkpoint import gpt_shapes, write_checkpoint

from ds_reshard.cli.main import main
from ds_reshard.cli.render import printable
from ds_reshard.errors import CheckpointNotFound
from ds_reshard.operations import Inspection, inspect

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)
DP = 2
Save = Callable[..., Path]


@pytest.fixture(scope="session")
def save(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Calling it gives the folder of a checkpoint that two ranks of real DeepSpeed saved; each is made once."""

    @functools.cache
    def saved(stage: int | str, steps: int = 3) -> Path:
        folder = tmp_path_factory.mktemp(f"stage{stage}")
        worlds[DP].run("save", run=Run(stage, DP), model=MODEL, folder=str(folder), steps=steps, tag="step")
        return folder

    return saved


@pytest.fixture
def broken(save: Save, tmp_path: Path) -> Save:
    """As `save`, but a copy that the test may break; gives the tag's folder."""

    def copied(stage: int | str) -> Path:
        return Path(shutil.copytree(save(stage), tmp_path / "copy")) / "step"

    return copied


def lines(inspection: Inspection) -> list[str]:
    """Each fault as "file: what", without the folder."""
    return [
        f"{Path(fault.where).name}: {fault.what}".replace(inspection.folder, "FOLDER") for fault in inspection.faults
    ]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


FACTS = [
    # stage, wrapper, stage told, flat buffers, states, elements of the groups, roles, files
    (0, "none", 0, None, {"fp32", "exp_avg", "exp_avg_sq", "step"}, [None, None], {"parameter": 371, "buffer": 23}, 1),
    (
        1,
        "zero",
        1,
        2,
        {"fp32", "exp_avg", "exp_avg_sq", "step"},
        [245, 22],
        {"trainable": 267, "frozen": 104, "buffer": 23},
        3,
    ),
    (
        2,
        "zero",
        2,
        2,
        {"fp32", "exp_avg", "exp_avg_sq", "step"},
        [245, 22],
        {"trainable": 267, "frozen": 104, "buffer": 23},
        3,
    ),
    (
        3,
        "zero3",
        3,
        2,
        {"fp32", "exp_avg", "exp_avg_sq", "step"},
        [245, 22],
        {"trainable": 267, "frozen": 104, "buffer": 23},
        4,
    ),
    (
        "bf16",
        "bf16",
        1,
        2,
        {"fp32", "exp_avg", "exp_avg_sq", "step"},
        [245, 22],
        {"trainable": 267, "frozen": 104, "buffer": 23},
        3,
    ),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "wrapper", "told", "buffers", "states", "numels", "roles", "files"), FACTS, ids=[str(f[0]) for f in FACTS]
)
def test_a_real_checkpoint_is_told(
    save: Save,
    stage: int | str,
    wrapper: str,
    told: int,
    buffers: int | None,
    states: set[str],
    numels: list[int | None],
    roles: dict[str, int],
    files: int,
) -> None:
    """Stage, wrapper, groups, states, parameters and sizes are those of the run that saved; there is no fault."""
    import deepspeed

    folder = save(stage)
    found = inspect(str(folder))
    assert found.faults == ()
    assert (found.format, found.version, found.tag) == ("DeepSpeed ZeRO", deepspeed.__version__, "step")
    assert (found.stage, found.wrapper, found.dp, found.arrangement.buffers) == (told, wrapper, DP, buffers)
    assert {state.kind for state in found.states} == states
    assert {state.dtypes for state in found.states} == {("float32",)}
    assert [state.kind for state in found.states if state.scalar] == ["step"]
    assert [(group.members, group.numel) for group in found.groups] == list(zip([3, 4], numels, strict=True))
    assert [group.hyperparameters["weight_decay"] for group in found.groups if group.hyperparameters] == [0.1, 0.0]
    # A stage-0 optimizer counts the step by which DeepSpeed makes its states.
    assert (found.steps.global_steps, found.steps.optimizer_steps) == (3, (4,) if stage == 0 else (3,))
    assert {role: count["elements"] for role, count in found.counts.items()} == roles
    assert found.arrangement.round_robin is False
    assert len(found.files) == files
    assert found.total_nbytes == sum(file.stat().st_size for file in (folder / "step").iterdir())


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_parameter_has_its_shape_and_role(save: Save, stage: int) -> None:
    """Shapes are whole at every stage, tied weights name their owner, frozen ones are told from trainable ones."""
    entries = {entry.name: entry for entry in inspect(str(save(stage))).parameters}
    trained, frozen = ("parameter", "parameter") if stage == 0 else ("trainable", "frozen")
    assert entries["first.weight"].shape == (11, 7)
    assert entries["first.weight"].dtype == "bfloat16"
    assert entries["first.weight"].role == trained
    assert entries["first.weight"].group == (None if stage == 0 else 0)
    assert (entries["tower.weight"].shape, entries["tower.weight"].role) == ((13, 7), frozen)
    assert (entries["norm.running_mean"].shape, entries["norm.running_mean"].role) == ((11,), "buffer")
    assert (entries["head.weight"].shape, entries["head.weight"].tied_to) == ((13, 7), "embed.weight")


@pytest.mark.distributed
def test_the_tag_may_be_named_or_be_the_path(save: Save) -> None:
    """The folder with `latest`, the folder and a tag, and the tag's own folder are one checkpoint."""
    folder = save(2)
    told = [inspect(str(folder)), inspect(str(folder), tag="step"), inspect(str(folder / "step"))]
    assert [(one.folder, one.tag, one.parameters) for one in told] == [(told[0].folder, "step", told[0].parameters)] * 3


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "bf16"])
def test_json_says_all_of_it(save: Save, capsys: pytest.CaptureFixture[str], stage: int | str) -> None:
    """`inspect --json` is the Inspection's own JSON, unchanged by writing and reading it, and exits with 0."""
    status, shown = run(capsys, "inspect", save(stage), "--json")
    expected = inspect(str(save(stage))).to_json()
    assert status == 0
    assert {**json.loads(shown), "bytes_read": None} == {**expected, "bytes_read": None}


@pytest.mark.distributed
def test_the_terminal_view_is_a_summary(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """Layout, groups and parameters are shown; a checkpoint without faults exits with 0 and says none."""
    status, shown = run(capsys, "inspect", save(3))
    assert status == 0
    assert "stage 3, dp 2, wrapper zero3, flat buffers a rank: 2" in shown
    assert all(word in shown for word in ("weight_decay=0.1", "first.weight", "tied to", "running_mean"))
    assert "fault" not in shown


def _optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.distributed
def test_a_missing_shard_is_named(broken: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """The last rank's optimizer shard is missed although nothing else of the checkpoint is."""
    folder = broken(2)
    (folder / _optim(1)).unlink()
    found = inspect(str(folder))
    assert lines(found) == ["step: optim_states files of data-parallel ranks 1 are missing"]
    assert (found.stage, len(found.groups), found.steps.global_steps) == (2, 2, 3)
    status, shown = run(capsys, "inspect", folder)
    assert status == 1
    assert "1 fault found" in shown
    assert "to mend: restore the missing files" in shown


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_truncated_shard_is_named(broken: Save, stage: int, rank: int) -> None:
    """A shard that was cut short is one fault, whichever it is; the other shards still tell of the run."""
    folder = broken(stage)
    _truncate(folder / _optim(rank))
    found = inspect(str(folder))
    assert [line.split(": ")[0] for line in lines(found)] == [_optim(rank)]
    assert "cut short" in found.faults[0].what
    assert (found.stage, found.steps.optimizer_steps) == (stage, (3,))


@pytest.mark.distributed
@pytest.mark.parametrize("name", [_optim(0), _optim(1), "mp_rank_00_model_states.pt"])
def test_an_empty_file_is_named(broken: Save, name: str) -> None:
    """A file of no bytes is one fault, said in one way."""
    folder = broken(2)
    (folder / name).write_bytes(b"")
    found = inspect(str(folder))
    assert lines(found) == [f"{name}: is empty"]
    assert (found.stage, found.dp) == (2, DP)


@pytest.mark.distributed
def test_a_shard_under_another_name_is_named(broken: Save) -> None:
    """Shards that were swapped carry each other's name inside."""
    folder = broken(2)
    first, second = folder / _optim(0), folder / _optim(1)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    what = "was written under another name: a shard was copied or swapped"
    assert lines(inspect(str(folder))) == [f"{_optim(0)}: {what}", f"{_optim(1)}: {what}"]


@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "rank"), [(2, 0), (2, 1), (3, 1), ("bf16", 1)])
def test_a_shard_of_another_step_is_named(broken: Save, save: Save, stage: int | str, rank: int) -> None:
    """One shard of a later save of the same run differs in its step."""
    folder = broken(stage)
    shutil.copy(save(stage, steps=4) / "step" / _optim(rank), folder / _optim(rank))
    found = lines(inspect(str(folder)))
    # The second file is measured against the first: the files cannot tell which of two is the stranger.
    expected = f"{_optim(1)}: is of another step or run than {_optim(0)}: step of partition"
    assert sorted(line for line in found if ": step of" in line) == [f"{expected} {i} differs" for i in (0, 1)]


@pytest.mark.distributed
def test_a_model_file_of_another_step_is_named(broken: Save, save: Save) -> None:
    """At stage 3 each rank's model file counts the steps."""
    folder = broken(3)
    shutil.copy(save(3, steps=4) / "step" / _model(1), folder / _model(1))
    assert f"{_model(1)}: is of another step or run than {_model(0)}: global_steps differs" in lines(
        inspect(str(folder))
    )


@pytest.mark.distributed
def test_all_faults_are_found_at_once(broken: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file broken in its own way: each is told, in JSON too, each with what mends it, and the exit is 1."""
    folder = broken(3)
    _truncate(folder / _model(0))
    (folder / _model(1)).write_bytes(b"")
    shutil.copy(folder / _optim(1), folder / _optim(0))
    (folder / _optim(1)).unlink()
    status, shown = run(capsys, "inspect", folder, "--json")
    told = json.loads(shown)
    where = [Path(fault["where"]).name for fault in told["faults"]]
    assert status == 1
    assert where == [_optim(0), _model(0), _model(1)]
    assert all(fault["mend"] for fault in told["faults"])
    assert (told["stage"], told["dp"], told["version"]) == (3, None, None)
    assert {file["name"]: file["role"] for file in told["files"]} == {
        _optim(0): "optimizer",
        _model(0): "model",
        _model(1): "model",
    }


@pytest.mark.distributed
def test_faults_do_not_hide_each_other(broken: Save, save: Save) -> None:
    """A stage-3 checkpoint without rank 0's model file, with rank 1's optimizer shard of another step."""
    folder = broken(3)
    (folder / _model(0)).unlink()
    shutil.copy(save(3, steps=4) / "step" / _optim(1), folder / _optim(1))
    found = lines(inspect(str(folder)))
    assert "step: model_states files of data-parallel ranks 0 are missing" in found
    assert any(line.startswith(f"{_optim(1)}: is of another step") for line in found)


@pytest.mark.distributed
def test_a_shard_copied_over_another_is_named(broken: Save) -> None:
    """A copy of the right size, whose inner name was put right too, still holds the other shard's bytes."""
    folder = broken("bf16")
    copy = (folder / _optim(0)).read_bytes().replace(b"zero_pp_rank_0_mp", b"zero_pp_rank_1_mp")
    (folder / _optim(1)).write_bytes(copy)
    assert f"{_optim(1)}: holds the same bytes as {_optim(0)}: one shard was copied over another" in lines(
        inspect(str(folder))
    )


@pytest.mark.distributed
def test_a_shard_of_an_older_wider_save_is_unused(broken: Save) -> None:
    """DeepSpeed does not remove old shards: they are shown as unused, and are no fault."""
    folder = broken(2)
    shutil.copy(folder / _optim(0), folder / _optim(2))
    found = inspect(str(folder))
    assert (found.faults, [file.name for file in found.files if file.role == "unused"]) == ((), [_optim(2)])


@pytest.mark.parametrize("what", ["absent", "file", "empty folder", "latest names nothing", "no such tag"])
def test_what_is_not_there_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    """No checkpoint to speak of: CheckpointNotFound, exit status 2 and one line that says what to do."""
    path, tag = tmp_path / "run", None
    if what == "file":
        path.write_text("")
    elif what != "absent":
        path.mkdir()
    if what == "latest names nothing":
        (path / "latest").write_text("gone")
    if what == "no such tag":
        write_checkpoint(tmp_path / "run" / "inner", gpt_shapes(1, 4, 8), 2)
        path, tag = path / "inner", "gone"
    with pytest.raises(CheckpointNotFound, match=r"give the folder|check the path|--tag global_step1000"):
        inspect(str(path), tag=tag)
    status, shown = run(capsys, "inspect", path, *(["--tag", tag] if tag else []))
    assert (status, shown.count("\n"), "Traceback" in shown) == (2, 1, False)


def test_parameters_whose_division_no_file_says_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a fault; what the first files say is still told."""
    write_checkpoint(tmp_path, gpt_shapes(1, 4, 8), 2)
    folder = tmp_path / "global_step1000"
    entries = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save({**entries, "mp_world_size": 2}, folder / "mp_rank_00_model_states.pt")
    for path in [*folder.glob("*mp_rank_00_*.pt")]:
        content = torch.load(path, weights_only=False)
        torch.save(content, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    found = inspect(str(tmp_path))
    assert len(found.faults) == len(gpt_shapes(1, 4, 8))
    assert all(fault.what == "nothing says how it is cut" for fault in found.faults)
    assert (found.stage, found.steps.global_steps) == (2, 1000)
    assert run(capsys, "inspect", tmp_path)[0] == 1


def test_long_tables_are_cut_and_names_cannot_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 parameters are shown unless --all; control characters in a name are spelled out."""
    shapes = gpt_shapes(3, 4, 8) | {"\x1b[2Jwiped": (3,)}
    write_checkpoint(tmp_path, shapes, 2)
    status, short = run(capsys, "inspect", tmp_path)
    _, long = run(capsys, "inspect", tmp_path, "--all")
    assert (status, f"and {len(shapes) - 20} more" in short, "more:" in long) == (0, True, False)
    assert ("layers.0.qkv.weight" in short, "layers.2.down.bias" in short, "layers.2.down.bias" in long) == (
        True,
        False,
        True,
    )
    assert printable("\x1b[2J") == "\\x1b[2J"
    assert "\x1b[2J" not in long
    assert "\\x1b[2Jwiped" in long


def test_torch_reads_the_synthetic_files(tmp_path: Path) -> None:
    """The synthetic checkpoints below are in torch.save's own format: torch.load gives the zeros."""
    import torch

    write_sparse(tmp_path / "some.pt", {"a": hole((3, 5), torch.bfloat16), "b": [hole((7,), torch.float32)]})
    read = torch.load(tmp_path / "some.pt", weights_only=False)
    assert torch.equal(read["a"], torch.zeros(3, 5, dtype=torch.bfloat16))
    assert torch.equal(read["b"][0], torch.zeros(7))
    write_sparse(tmp_path / "wide.pt", [hole((5 << 28,), torch.float32), hole((5 << 28, 3), torch.float32)])
    first, second = torch.load(tmp_path / "wide.pt", weights_only=False, mmap=True)
    assert (first.shape, second.shape) == ((5 << 28,), (5 << 28, 3))
    assert not first[::1000003].any() and not second[-1].any()


def test_opening_reads_less_than_a_hundredth(tmp_path: Path) -> None:
    """A synthetic checkpoint of 64 shards and more than 10 GB (sparse files): all of it is told from 1% of it."""
    nbytes = write_checkpoint(tmp_path, gpt_shapes(layers=48, width=1152), 64)
    started = time.perf_counter()
    found = inspect(str(tmp_path))
    print(f"{nbytes / 1e9:.1f} GB in {len(found.files)} files inspected in {time.perf_counter() - started:.3f} s")
    assert nbytes > 10 * 10**9
    assert (found.faults, found.dp, found.total_nbytes, found.optimizer) == ((), 64, nbytes, "AdamW")
    assert found.bytes_read is not None
    assert found.bytes_read < nbytes / 100


def test_inspecting_imports_no_framework(tmp_path: Path) -> None:
    """The command opens a checkpoint without torch, which takes longer to import than 64 shards to open."""
    write_checkpoint(tmp_path, gpt_shapes(1, 4, 8), 2)
    code = (
        "import sys; from ds_reshard.cli.main import main; status = main(['inspect', sys.argv[1], '--json']);"
        "sys.exit(status or sorted({'torch', 'numpy', 'deepspeed'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_folders_of_a_trainer_are_named(save: Save, tmp_path: Path) -> None:
    """What is given is Hugging Face's output_dir, with a folder for each save: the last one is the line to type."""
    for name in ("checkpoint-9", "checkpoint-10"):
        shutil.copytree(save(2), tmp_path / name)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointNotFound) as caught:
        inspect(str(tmp_path))
    assert "its folders hold some: checkpoint-9, checkpoint-10" in str(caught.value)
    assert str(caught.value).endswith(str(tmp_path / "checkpoint-10"))


def test_in_a_pipe_every_row_is_a_line(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """No box, and names whole, however long: what a program or grep reads."""
    status, shown = run(capsys, "inspect", save(2), "--all")
    assert status == 0 and not set("─│┃━╭") & set(shown)
    found = inspect(str(save(2)))
    rows = [line.split("\t") for line in shown.splitlines() if not line.startswith("#")]
    assert {entry.name for entry in found.parameters} | {file.name for file in found.files} <= {row[0] for row in rows}
    assert ["folder", found.folder] in rows
