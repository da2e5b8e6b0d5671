"""What errors on a checkpoint of Megatron-LM give to mend it, commands or flags, are tried one after the other.

Lines of a load in a run are followed by `test_megatron_mending_chains.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_jobs import RUN
from messages import amended
from saved_worlds import FLAGS, GATED, Saved
from test_megatron_bad_input import _iteration, _nothing_proves

import ds_reshard.operations as tools
from ds_reshard.cli.main import main

FOUR = "gated tp2 pp2"
Places = dict[str, str]
"""The checkpoint, and what stands in a mending line for a folder, file or number of the reader's own."""


def _of(world: str, form: str = "buckets", **others: str) -> Callable[[Saved, Path], Places]:
    """What a world has saved; `others` are names and numbers, or worlds, as folders of format torch."""

    def made(saved: Saved, at: Path) -> Places:
        told = {name: str(saved(one, "torch")) if " " in one else one for name, one in others.items()}
        return {"source": str(saved(world, form)), **told}

    return made


def _without_arguments(saved: Saved, at: Path) -> Places:
    """A folder of DeepSpeed that tells nothing of a run of Megatron-LM."""
    source = saved(FOUR, "buckets")
    tools.convert(str(source), str(at / "zero2"), to="zero2", dp=2)
    for path in (at / "zero2").rglob("*_model_states.pt"):
        held = torch.load(path, weights_only=False)
        del held["args"]
        torch.save(held, path)
    return {"source": str(at / "zero2"), "DIR": str(source)}


def _renamed(saved: Saved, at: Path) -> Places:
    source = str(saved(FOUR, "buckets"))
    names = {one.name: f"model.{one.name}" for one in tools.inspect(source).parameters}
    for name, one in (("there", names), ("map.json", {new: old for old, new in names.items()})):
        (at / name).write_text(json.dumps(one))
    tools.convert(source, str(at / "dcp"), to="dcp", names=str(at / "there"))
    return {"source": str(at / "dcp"), "map.json": str(at / "map.json")}


def _renamed_without(saved: Saved, at: Path) -> Places:
    """A folder of DeepSpeed under other names, that tells nothing of a run of Megatron-LM."""
    places = _renamed(saved, at)
    source = saved(FOUR, "buckets")
    tools.convert(str(source), str(at / "zero2"), to="zero2", dp=2, names=str(at / "there"))
    for path in (at / "zero2").rglob("*_model_states.pt"):
        held = torch.load(path, weights_only=False)
        del held["args"]
        torch.save(held, path)
    return {**places, "source": str(at / "zero2"), "DIR": str(source)}


TO, TORCH = "convert {source} {out} --to ", "convert {source} {out} --to megatron-torch "
LR = f"lr {{source}} -- {RUN}"
ROWS: dict[str, tuple[Callable[[Saved, Path], Places], str, str | tuple[str, ...]]] = {
    # the checkpoint, the command that is refused, and where in what it says the line is that mends it; of a chain, in
    # each error after the other
    "rows of a vocabulary": (_of(FOUR, DIR="gated pp2 vp2"), TORCH + "--tp 1", "(--like DIR)"),
    "rows of a vocabulary, any tp": (_of(FOUR), TORCH + "--tp 1", "(--to megatron without --tp and --pp)"),
    "heads": (_of(FOUR, **{"--tp": "--tp=2"}), TORCH + "--tp 4", "another (--tp)"),
    "ranks of experts": (_of("experts ep2"), TORCH + "--dp 1", "(--dp 2), or a multiple"),
    "no experts": (_of(FOUR), TORCH + "--ep 2", "(leave out --ep)"),
    "no arguments": (_without_arguments, TO + "megatron", "(--like DIR)"),
    "other names": (_renamed, TO + "megatron", "(--names map.json)"),
    "shifted states": (_of("many buckets dp2", "model_space"), TO + "zero2", "(ds-reshard convert .+? --repair), if"),
    "numbers of an fp32 optimizer": (_of("gated fp32", "torch"), TO + "zero2", "(--to safetensors) for the weights"),
    "another iteration": (_of(FOUR, "torch"), "inspect {source} --tag 99", "(--tag iter_0000005)"),
    "rates of another iteration": (_of(FOUR, "torch"), LR.replace("--", "--tag 99 --", 1), "(--tag iter_0000005)"),
    "rates without a batch": (_of(FOUR, "torch", N="4"), LR, "add (--global-batch-size N)"),
    "rates without an end": (_of(FOUR, "torch", N="5"), LR, "add (--train-iters N)"),
    "rates without a rate": (_of(FOUR, "torch", RATE="3e-4"), LR, "add (--lr RATE)"),
    "no arguments, of a renamed folder": (_renamed_without, TO + "megatron", ("(--like DIR)", "(--names map.json)")),
    "no experts, and rows of a vocabulary": (
        _of(FOUR, DIR="gated pp2 vp2"),
        TORCH + "--ep 2 --tp 1",
        ("(leave out --ep)", "(--like DIR)"),
    ),
    "heads, and rows of a vocabulary": (
        _of(FOUR, **{"--tp": "--tp=1", "DIR": "gated pp2 vp2"}),
        TORCH + "--tp 4",
        ("another (--tp)", "(--like DIR)"),
    ),
    "rates without a batch, of another iteration": (
        _of(FOUR, "torch", N="4"),
        LR.replace("--", "--tag 99 --", 1),
        ("add (--global-batch-size N)", "(--tag iter_0000005)"),
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_the_line_mends_it(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """It is taken out of the error: the command that was refused, changed as each line in turn says, ends well."""
    made, faulty, asked = ROWS[case]
    patterns = (asked,) if isinstance(asked, str) else asked
    places = {**made(saved, tmp_path), "out": str(tmp_path / "out"), "OUT": str(tmp_path / "out")}
    words = [word.format(**places) for word in faulty.split()]
    for wanting in filter(None, (re.search(r"add \((--[a-z-]+)", pattern) for pattern in patterns)):
        at = words.index(wanting[1])
        del words[at : at + 2]
    for pattern in patterns:
        assert main(words) == 2
        told = " ".join(capsys.readouterr().err.split())
        found = re.search(pattern, told)
        assert found is not None, told
        words = amended(words, found[1], places)
    assert main(words) == 0, capsys.readouterr().err
    assert not (tmp_path / "out").exists() or main(["verify", places["out"]]) == 0


def _unproved(saved: Saved, at: Path) -> str:
    copy = Path(shutil.copytree(saved("experts ep2", "buckets"), at / "copy"))
    _nothing_proves(_iteration(copy), saved)
    return str(copy)


SAVED_AGAIN = {
    # a folder that is refused, the world and the form that the flags of the mending line save of it
    "nothing proves whose states are whose": (_unproved, "experts ep2", "model_space"),
    "numbers of an fp32 optimizer": (lambda saved, _: str(saved("gated fp32", "torch")), "gated fp32", "plain"),
}


@pytest.mark.parametrize("case", SAVED_AGAIN)
def test_what_is_saved_again_as_the_line_says_is_read(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    made, world, form = SAVED_AGAIN[case]
    command = ["--to", "zero2", "--dp", "2"]
    assert main(["convert", made(saved, tmp_path), str(tmp_path / "out"), *command]) == 2
    found = re.search(r"save it with --([a-z-]+)(?: (torch_dist))?", " ".join(capsys.readouterr().err.split()))
    assert found is not None and FLAGS[form][found[1].replace("-", "_")] == (found[2] or True)
    assert main(["convert", str(saved(world, form)), str(tmp_path / "out"), *command]) == 0


G = f"--bf16 --use-distributed-optimizer {GATED}"
OVERRIDE = "--override-opt-param-scheduler"
FLAGGED: list[tuple[str, Any, Any]] = [
    # the flags of the coming run, where in the first fault the line is that mends it, and what of it is given and how;
    # of a chain, in each verdict after the other
    ("--lr 1e-3", f"add ({OVERRIDE}) for this run's", "{0}"),
    ("--lr 1e-3", "or (--use-checkpoint-opt-param-scheduler) for the checkpoint's", "{0}"),
    ("--decoupled-lr 1e-3 --decoupled-min-lr 1e-4", "or (--no-load-optim)", "{0}"),
    ("--optimizer sgd --no-load-optim", "(leave out --use-distributed-optimizer)", "{0}"),
    (f"{OVERRIDE} --use-checkpoint-opt-param-scheduler", "(leave out) one of --[a-z-]+ and (--[a-z-]+)", "{0} {1}"),
    ("--no-load-optim --load-masters-only", "(leave out) one of (--[a-z-]+) and", "{0} {1}"),
    ("--reset-dataloader --dataloader-type external", "(leave out) one of (--[a-z-]+) and", "{0} {1}"),
    (
        "--override-optim-hparams betas,epsilon",
        "(--override-optim-hparams) epsilon.* name some of: ([a-z]+)",
        "{0} {1}",
    ),
    (
        "--override-optim-hparams lr",
        f"(--override-optim-hparams) lr.* leave it out and add ({OVERRIDE})",
        "{1} without {0}",
    ),
    ("--ckpt-step 7", "(--ckpt-step 5)", "{0}"),
    (
        "--ckpt-step 7 --lr 1e-3 --no-load-optim --load-masters-only",
        ("(leave out) one of (--[a-z-]+) and", "(--ckpt-step 5)", f"add ({OVERRIDE}) for this run's"),
        ("{0} {1}", "{0}", "{0}"),
    ),
    ("--ckpt-step 0 --lr 1e-3", ("(leave) it (out), or give", f"add ({OVERRIDE})"), ("{0} {1} --ckpt-step", "{0}")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "pattern", "line"), FLAGGED, ids=[f"{row[0]}: {row[1]}" for row in FLAGGED])
def test_the_flags_of_the_line_mend_a_load(saved: Saved, releases: Any, flags: str, pattern: str, line: str) -> None:
    """Preflight says no, and then yes with them; and so does the load, into which all weights come."""
    asked = {"folder": str(saved(FOUR, "buckets")), "world": 1}
    words = [*G.split(), *flags.split()]
    chain = zip(pattern, line, strict=True) if isinstance(pattern, tuple) else [(pattern, line)]
    for one, how in chain:
        (said,) = releases["0.19.2"].run("foresee_jobs:foresee", arguments=" ".join(words), **asked)
        assert not said["loads"]
        found = re.search(one, "{where}: {what}; {mend}".format(**said["faults"][0]))
        assert found is not None, said["faults"]
        words = amended(words, how.format(*found.groups()), {})
    (said,) = releases["0.19.2"].run("foresee_jobs:foresee", arguments=" ".join(words), **asked)
    assert said["loads"], said["verdict"]
    (told,) = releases["0.19.2"].run("load_jobs:load", arguments=f"{' '.join(words)} --load {asked['folder']}")
    assert not [text for text in told["wrong"] if text.startswith("weight")]
