"""What acts in a checkpoint is named by every tool, of every format, wherever it stands; no tool runs or writes it.

Checkpoints of the builders in tests/formats, and what `convert` makes of them (synthetic); tests/hosts has the loads.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import rebuilt
from payloads import ACTING, Attack, before, put_before, twice
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointNotFound, ReadFailed, UnsafePickle, raise_faults
from ds_reshard.operations import Options, convert, fingerprint, pickles
from ds_reshard.operations.pickles import refuse_unsafe_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
import nanotron_builder
from zero_builder import TAG, Built, write

BUILT = Built(groups=((("first", (5, 3)), ("second", (4,))), (("third", (3,)),)), config={"bf16": {"enabled": True}})
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(BUILT, tmp_path_factory.mktemp("zero") / "saved")


@pytest.fixture
def copied(zero: Path, tmp_path: Path) -> Path:
    shutil.copytree(zero, tmp_path / "saved")
    return tmp_path / "saved"


def _value(name: str, change: Callable[[dict[str, Any], Any], object]) -> Callable[[Path, Path], None]:
    """A file whose value holds the attack."""

    def run(folder: Path, mark: Path) -> None:
        path = folder / TAG / name
        content = torch.load(path, weights_only=False)
        change(content, Attack(f"touch {mark}"))
        torch.save(content, path)

    return run


def _prefix(name: str, payload: str) -> Callable[[Path, Path], None]:
    """A file whose first instructions act, the result thrown away."""
    return lambda folder, mark: put_before(folder / TAG / name, ACTING[payload][0](f"touch {mark}"))


def _two(path: Path, mark: Path) -> None:
    path.write_bytes(twice(path.read_bytes(), ACTING["thrown away"][0](f"touch {mark}")))


PLACES: dict[str, Callable[[Path, Path], None]] = {
    "a key beside optimizer_state_dict": _value(OPTIM, lambda held, attack: held.update(extra=attack)),
    "ds_config of the optimizer file": _value(OPTIM, lambda held, attack: held.update(ds_config={"a": attack})),
    "inside optimizer_state_dict": _value(OPTIM, lambda held, a: held["optimizer_state_dict"].update(clip_grad=a)),
    "a param group": _value(
        OPTIM, lambda held, a: held["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].update(lr=a)
    ),
    "a key of the model file": _value(MODEL, lambda held, attack: held.update(client=[{"deep": (attack,)}])),
    "an entry of the module": _value(MODEL, lambda held, attack: held["module"].update(state=attack)),
    "the first instructions of the optimizer file": _prefix(OPTIM, "thrown away"),
    "the first instructions of the model file": _prefix(MODEL, "thrown away"),
    "by STACK_GLOBAL, optimizer": _prefix(OPTIM, "by name from the stack"),
    "a second data.pkl of the optimizer file": lambda folder, mark: _two(folder / TAG / OPTIM, mark),
    "a second data.pkl of the model file": lambda folder, mark: _two(folder / TAG / MODEL, mark),
    "by STACK_GLOBAL, model": _prefix(MODEL, "by name from the stack"),
}


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def _flat(text: str) -> str:
    """What a table says, without its lines."""
    return "".join(text.replace("│", " ").split())


def refusals(capsys: pytest.CaptureFixture[str], folder: Path, whole: Path, out: Path, to: str) -> None:
    """Each tool on a checkpoint that acts; `whole` is the same one without."""
    for words in (("inspect",), ("verify",), ("verify", "--deep"), ("verify", "--pickles")):
        status, told = run(capsys, *words, folder)
        assert status == 1 and "call" in told and "nothingwasrun" in _flat(told), words
        assert "finding" in told.splitlines()[-1] and "pickles: " in told.splitlines()[-1], told
    words = ["convert", folder, out, "--to", to]
    status, told = run(capsys, *words)
    assert status == 2 and "nothing was run" in told and not out.exists()
    for one, other in ((folder, whole), (whole, folder)):
        status, told = run(capsys, "diff", one, other)
        assert status == 2 and "nothing was run" in told
    for command in (("fingerprint", folder), ("plan", folder, "--to", to)):
        status, told = run(capsys, *command)
        assert status == 2 and "nothing was run" in told, command


@pytest.mark.parametrize("place", PLACES)
def test_each_tool_names_or_refuses_it(
    copied: Path, zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    mark = tmp_path / "ran"
    PLACES[place](copied, mark)
    refusals(capsys, copied, zero, tmp_path / "out", "zero3")
    assert not mark.exists()


def test_the_picture_of_rates_refuses_it(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It opens the model file and the first optimizer file."""
    PLACES["a key of the model file"](copied, tmp_path / "ran")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 2}))
    status, told = run(capsys, "lr", copied, "--config", tmp_path / "ds.json")
    assert status == 2 and "nothing was run" in told and not (tmp_path / "ran").exists()


def test_without_it_each_tool_is_content(zero: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("inspect",), ("verify",), ("verify", "--deep"), ("verify", "--pickles")):
        status, told = run(capsys, *words, zero)
        assert status == 0 and told.splitlines()[-1].endswith("pickles: 3 read, nothing in them acts"), words
    assert run(capsys, "convert", zero, tmp_path / "out", "--to", "zero3")[0] == 0
    assert run(capsys, "diff", zero, tmp_path / "out")[0] == 0
    told = json.loads(run(capsys, "inspect", zero, "--json")[1])
    assert told["pickles"] == 3 and json.loads(run(capsys, "verify", zero, "--json")[1])["pickles"] == 3


@pytest.fixture(scope="module")
def others(zero: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state in other formats, and a checkpoint of nanotron."""
    made = tmp_path_factory.mktemp("others")
    for to in ("universal", "dcp", "accelerate", "zero3"):
        convert(str(zero), str(made / to), to=to, options=Options(threads=1))
    nanotron_builder.write(nanotron_builder.Run(), made / "nanotron")
    return {path.name: path for path in made.iterdir()}


TO = {"universal": "zero2", "dcp": "zero2", "accelerate": "zero2", "zero3": "zero2", "nanotron": "nanotron"}


def _pickled(folder: Path) -> list[Path]:
    """The files that hold pickles: archives of torch.save, and directories."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and (path.suffix == ".pt" or path.name == ".metadata" or path.suffix == ".distcp")
    )


def _attack(path: Path, mark: Path) -> None:
    """Put what acts before a file's pickle; of several archives in one file into that of an object."""
    payload = ACTING["thrown away"][0](f"touch {mark}")
    if path.suffix == ".pt":
        put_before(path, payload)
    else:
        path.write_bytes(before(path.read_bytes(), payload))


@pytest.mark.slow
@pytest.mark.parametrize("name", TO)
def test_in_each_file_of_each_format(
    others: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A folder's first, middle and last file with a pickle, one at a time; the directory of DCP among them."""
    files = [path for path in _pickled(others[name]) if path.suffix != ".distcp"]
    chosen = {0, len(files) // 2, len(files) - 1} | {i for i, path in enumerate(files) if path.name == ".metadata"}
    for number in sorted(chosen):
        path = tmp_path / f"copy{number}"
        shutil.copytree(others[name], path)
        mark = tmp_path / f"ran{number}"
        _attack(path / files[number].relative_to(others[name]), mark)
        refusals(capsys, path, others[name], tmp_path / "out", TO[name])
        assert not mark.exists()


def test_a_folder_that_is_not_there_has_another_path(tmp_path: Path) -> None:
    """Which is no matter of permissions."""
    with pytest.raises(ReadFailed, match=r"(?s)nowhere: cannot be listed.*check the path$"):
        refuse_unsafe_folder(str(tmp_path / "nowhere"), alone=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT])
def test_a_file_that_cannot_be_searched_is_no_safe_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nor is a folder that cannot be listed. One that is damaged and no part of the checkpoint ends nothing."""
    beside = copied / TAG / "beside"
    (beside / "folder").mkdir(parents=True)
    (beside / "notes.bin").write_bytes(b"\x80\x04 half a pickle")
    assert fingerprint(str(copied)).tensors
    for function, path in (("open", beside / "notes.bin"), ("scandir", beside / "folder")):
        with monkeypatch.context() as patch, pytest.raises((CheckpointNotFound, ReadFailed), match=path.name):
            patch.setattr(os, function, _refusing(getattr(os, function), str(path), code))
            fingerprint(str(copied))


def _refusing(function: Callable[..., Any], path: str, code: int) -> Callable[..., Any]:
    """A function of `os` that fails at this path."""

    def called(given: Any, *more: Any, **named: Any) -> Any:
        if given == path:
            raise OSError(code, os.strerror(code), path)
        return function(given, *more, **named)

    return called


def test_files_beside_are_searched(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the tag's folder, and in the folder above it, where a trainer keeps its own; not in other tags."""
    mark = tmp_path / "ran"
    for place in (copied / "rng_state_0.pth", copied / TAG / "notes.bin"):
        torch.save({"states": Attack(f"touch {mark}")}, place)
        for words in (("inspect",), ("verify",)):
            status, told = run(capsys, *words, copied, "--json")
            assert status == 1 and [fault["where"] for fault in json.loads(told)["faults"]] == [str(place)]
        place.unlink()
    (copied / "other_tag").mkdir()
    torch.save(Attack(f"touch {mark}"), copied / "other_tag" / "x.pt")
    assert run(capsys, "inspect", copied)[0] == 0
    assert run(capsys, "verify", "--pickles", copied)[0] == 1
    assert not mark.exists()


def test_what_could_not_be_read_is_told_by_each_tool(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no pickle, though it is called so, and a second pickle in an archive."""
    (copied / TAG / "notes.pkl").write_bytes(b"hello")
    for words in (("inspect",), ("verify",), ("verify", "--pickles")):
        status, told = run(capsys, *words, copied)
        assert status == 1 and "notes.pkl" in _flat(told), words
        assert told.splitlines()[-1].endswith(
            "pickles: 3 read, nothing in them acts; 1 file could not be read to the end"
        ), told
        told = json.loads(run(capsys, *words, copied, "--json")[1])
        assert (told["pickles"], told["pickles_unread" if "--pickles" not in words else "unread"]) == (3, 1)
    (copied / TAG / "notes.pkl").unlink()
    evil = before(pickle.dumps(1), ACTING["thrown away"][0]("touch x"))
    path = copied / TAG / MODEL
    path.write_bytes(rebuilt(path.read_bytes(), {"other.pkl": evil}))
    for words in (("inspect",), ("verify",), ("verify", "--pickles")):
        status, told = run(capsys, *words, copied)
        assert status == 1 and "other.pkl" in _flat(told) and "posix.system" in _flat(told), words
        assert told.splitlines()[-1].endswith("pickles: 4 read, 1 finding"), told


class Mine:
    pass


class Yours:
    pass


@pytest.mark.parametrize("words", [("verify", "--pickles"), ("inspect",)], ids=" ".join)
def test_all_classes_stand_in_one_line_of_each_tool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Followed, it leaves nothing to trust; two files have one of them each."""
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save([Mine()], tmp_path / "one.pt")
    torch.save([Yours(), Mine()], tmp_path / "other.pt")
    status = main([*words, str(tmp_path)])
    told = capsys.readouterr()
    lines = [line for line in (told.out + told.err).splitlines() if "--trust" in line]
    assert status == 1 and len(lines) == 1, told
    trust = re.findall(r"--trust (\S+)", lines.pop())
    assert len(trust) == 2 and main([*words, str(tmp_path), *(f"--trust={name}" for name in trust)]) == 0


class Theirs:
    pass


CLASSES = (Mine, Yours, Theirs)


def _of_each_file(zero: Path) -> Path:
    """A class in each of three files."""
    for path, one in zip(sorted((zero / TAG).glob("*.pt")), CLASSES, strict=True):
        content = torch.load(path, weights_only=False)
        torch.save({**content, "one": one()}, path)
    return zero


def _plain(folder: Path) -> Path:
    """Weights beside a scheduler and an optimizer, as a script of torch leaves them."""
    folder.mkdir()
    torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin")
    torch.save({"last_epoch": 1, "one": Mine()}, folder / "scheduler.pt")
    torch.save({"state": {}, "param_groups": [{"params": [], "one": Yours()}]}, folder / "optimizer.pt")
    torch.save(Theirs(), folder / "training_args.bin")
    return folder


@pytest.mark.parametrize(
    "words",
    ["inspect", "verify --deep", "fingerprint", "plan --to zero3", "diff", "convert --to zero3", "lr", "preflight"],
)
def test_classes_of_several_files_stand_in_one_line(
    words: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of DeepSpeed's, and of plain PyTorch in a conversion; with the line the tool goes on to its end."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    _in_one_line(capsys, words, _of_each_file(copied), config)
    if words.startswith("convert"):
        _in_one_line(capsys, "convert --to safetensors", _plain(tmp_path / "plain"), config)


def _in_one_line(capsys: pytest.CaptureFixture[str], words: str, folder: Path, config: Path) -> None:
    command, *options = words.split()
    more = {
        "diff": [folder],
        "convert": [folder.with_name(f"{folder.name} converted")],
        "lr": ["--config", config],
        "preflight": ["--config", config, "--world", "2"],
    }.get(command, [])
    status, told = run(capsys, command, folder, *more, *options)
    (line,) = {line for line in told.splitlines() if "--trust" in line}
    trust = re.findall(r"--trust ([\w.]*\w)", line)
    assert status and sorted(trust) == sorted(f"{__name__}.{one.__name__}" for one in CLASSES), told
    status, told = run(capsys, command, folder, *more, *options, *(f"--trust={name}" for name in trust))
    assert status == (command == "lr"), told  # which finds that the rates are others


def test_a_class_of_ones_own_is_trusted(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _value(MODEL, lambda held, _: held.update(mine=Mine()))(copied, tmp_path)
    trust = ("--trust", f"{__name__}.Mine")
    for words in (("inspect", copied), ("verify", copied)):
        assert run(capsys, *words)[0] == 1
        assert run(capsys, *words, *trust)[0] == 0
    for words in (
        ("fingerprint", copied),
        ("plan", copied, "--to", "zero3"),
        ("diff", copied, copied),
        ("convert", copied, tmp_path / "out", "--to", "zero3"),
    ):
        status, told = run(capsys, *words)
        assert status == 2 and f"--trust {__name__}.Mine" in told
        assert run(capsys, *words, *trust)[0] == 0
    assert run(capsys, "inspect", tmp_path / "out", *trust)[0] == 0


def _directory_of(path: Path, offset: int, nbytes: int) -> None:
    """A `.metadata` of torch beside a file, which says that one object lies at some bytes of it."""
    index = MetadataIndex(fqn="harmless")
    info = _StorageInfo(relative_path=path.name, offset=offset, length=nbytes)
    written = Metadata(state_dict_metadata={"harmless": BytesStorageMetadata()}, storage_data={index: info})
    (path.parent / ".metadata").write_bytes(pickle.dumps(written))


def test_a_directory_beside_a_file_hides_nothing_of_it(tmp_path: Path) -> None:
    """Whoever loads the file unpickles all of it, whatever the directory says; torch's own names alone are parts."""
    mark = tmp_path / "ran"
    path = tmp_path / "folder" / "custom_checkpoint_0.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps([b"\x80\x02}.", Attack(f"touch {mark}")]))
    at = path.read_bytes().index(b"\x80\x02}.")
    _directory_of(path, at, 4)
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        refuse_unsafe_folder(str(path.parent), alone=True)
    assert not mark.exists()


def test_two_machines_that_see_like_files_search_all_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's files have the same names, numbers, sizes and times, and are others."""
    for number in range(2):
        torch.save(Attack("true") if number else [1], tmp_path / f"{number}.pt")
    others: dict[str, list[object]] = {}

    def gathered(value: object, group: object = None) -> list[object]:
        if isinstance(value, tuple):
            others.setdefault("marks", [value, (others.get("machine", [value[0]])[0], value[1])])
            return others["marks"]
        return [value, value]

    monkeypatch.setattr(pickles, "gather", gathered)
    monkeypatch.setattr(pickles, "broadcast", lambda value, group=None: value)
    monkeypatch.setattr(pickles, "agree", lambda faults, *, subject, **_: raise_faults(faults, subject=subject))
    refuse_unsafe_folder(str(tmp_path))  # one machine: the first of two ranks searches the first file
    others = {"machine": ["another"]}
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        refuse_unsafe_folder(str(tmp_path))
