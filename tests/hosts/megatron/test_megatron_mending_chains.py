"""Mending lines of a refused load of Megatron-LM, followed one after the other to their ends.

Each way that an error offers is taken, in what it says and no other words: it ends in a load of which every element is
what was saved, or in an error that offers nothing further. What lines lead back to is a fault, and so are too many.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from saved_worlds import DISTRIBUTED, FLAGS, GATED, TIED, TP

from ds_reshard.cli.main import main

pytestmark = pytest.mark.slow
RELEASE = "0.19.2"
TRACKER = "latest_checkpointed_iteration.txt"
MOST = 4
SHARDED, PLAIN = DISTRIBUTED + GATED, f"--bf16 {GATED}"
FP16 = f"--fp16 --initial-loss-scale 4096 --use-distributed-optimizer {GATED}"
SOFTMAX = f"{SHARDED}{TP}--softmax-type learnable "


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was saved, and how; what is done to the folder, and what it is loaded with.

    `differs` are the flags of the run that the saved one had not: of another model. `ends` is how many ways end well.
    """

    run: str = SHARDED
    form: str = "model_space"
    saved: dict[str, Any] = field(default_factory=dict)
    by: str = "load_jobs:save"
    ranks: tuple[int, int] = (1, 1)
    change: Callable[[Path, Any], Path] = lambda folder, releases: folder
    flags: str = ""
    differs: str = ""
    frozen: str = ""
    adam: bool = False
    ends: int = 1


def _renamed(folder: Path, name: str) -> Path:
    (folder / "iter_0000005").rename(folder / name)
    return folder


def _lost(folder: Path) -> Path:
    (folder / TRACKER).unlink()
    return folder


def _deep(folder: Path) -> Path:
    shutil.copytree(folder, folder.parent / "runs" / "one" / "copy")
    return folder.parent / "runs"


def _flat(folder: Path) -> Path:
    shutil.copytree(folder / "iter_0000005", folder.parent / "flat")
    return folder.parent / "flat"


def _of_strangers(folder: Path, releases: Any) -> Path:
    for file in folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        releases[RELEASE].run("load_jobs:stranger", path=str(file))
    return folder


FROZEN = {"frozen": "linear_fc2"}
CASES = {
    # 3: names of a module around
    "a module around, by name": Case(saved={"around": "language_model"}),
    "a module around, flat": Case(saved={"around": "language_model"}, form="buckets", ends=0),
    "a module around, format torch": Case(saved={"around": "language_model"}, form="torch", run=PLAIN, ends=0),
    # 5, 8: a policy that cannot be
    "two policies": Case(flags="--no-load-optim --load-masters-only", ends=2),
    # 6: other tensors
    "a bias more": Case(differs="--add-qkv-bias "),
    "a bias more, format torch": Case(differs="--add-qkv-bias ", form="torch", ends=2),
    "a bias more, of a model to begin with": Case(differs="--add-qkv-bias ", flags="--finetune", ends=2),
    "tied embeddings": Case(run=DISTRIBUTED + TIED, differs="--untie-embeddings-and-output-weights "),
    "an answer that Megatron does not take": Case(
        run=FP16, flags="--dist-ckpt-strictness return_all --no-load-optim --load-main-params-from-ckpt", ends=1
    ),
    # 7: parameters that one run alone trains
    "frozen now": Case(frozen="linear_fc2", ends=2),
    "frozen now, flat": Case(frozen="linear_fc2", form="buckets", ends=2),
    "trained now": Case(saved=FROZEN, ends=2),
    "trained now, format torch": Case(saved=FROZEN, form="torch", ends=2),
    "another is frozen": Case(saved={"frozen": "layers.0."}, form="buckets", frozen="layers.1.", ends=2),
    "frozen, under another layout": Case(
        saved=FROZEN, form="torch", frozen="linear_fc2", ranks=(1, 2), differs=TP, ends=2
    ),
    # 13: weights alone
    "no optimizer was saved": Case(run=f"{SHARDED}--no-save-optim "),
    "no random states were saved": Case(run=f"{FP16}--no-save-rng ", form="torch"),
    # 15: torch's own Adam
    "fp16 under torch's Adam": Case(run=FP16, form="buckets", adam=True),
    # 17: a part that is not supported
    "offsets of softmax, flat": Case(
        run=SOFTMAX, form="torch", ranks=(2, 1), differs="--tensor-model-parallel-size 1 "
    ),
    # 18: places
    "an iteration": Case(change=lambda folder, _: folder / "iter_0000005"),
    "a file": Case(change=lambda folder, _: folder / TRACKER),
    "a file of an iteration": Case(change=lambda folder, _: folder / "iter_0000005" / ".metadata"),
    "no tracker": Case(change=lambda folder, _: _lost(folder)),
    "two folders above": Case(change=lambda folder, _: _deep(folder)),
    "the files of an iteration": Case(change=lambda folder, _: _flat(folder)),
    "another name of an iteration": Case(change=lambda folder, _: _renamed(_lost(folder), "step5")),
    "a number without zeros": Case(change=lambda folder, _: _renamed(folder, "iter_5")),
    "no step": Case(flags="--ckpt-step 0", ends=2),
    "another step": Case(flags="--ckpt-step 7"),
    "nothing there": Case(
        change=lambda folder, _: folder.parent / "none", flags="--exit-on-missing-checkpoint", ends=0
    ),
    # 19: classes that nobody knows
    "classes to trust": Case(run=PLAIN, form="torch", change=_of_strangers),
}


@dataclass(frozen=True, kw_only=True)
class Try:
    """A load as it stands: its folder, and what the lines so far have changed."""

    case: Case
    folder: Path
    flags: str
    differs: str
    frozen: str
    settings: str = ""
    form: str = ""

    @property
    def words(self) -> str:
        form = FLAGS[self.form or self.case.form]["ckpt_format"]
        return f"{self.case.run}{self.differs}--load {self.folder} --ckpt-format {form} {self.flags} "

    def run(self, releases: Any) -> list[dict[str, Any]]:
        how = {"frozen": self.frozen, "adam": self.case.adam, "settings": self.settings}
        told = releases[RELEASE].run("load_jobs:tried", ranks=self.case.ranks[1], arguments=self.words, **how)
        return list(told)


def _without(flags: str, name: str) -> str:
    return " ".join(re.sub(rf"{name}(?: (?!--)\S+)?(?= |$)", "", flags).split())


def _saved_again(now: Try, flags: str, releases: Any, at: Path) -> Try:
    """What the saving run saves with these flags."""
    case, form = now.case, "model_space" if "reshardable" in flags else "plain"
    _save(case, form, releases, at / form)
    return replace(now, folder=at / form, form=form)


def _ways(now: Try, mend: str, releases: Any, at: Path) -> Iterator[Try]:
    """Each load that a mending line offers; what it says of a person's own doing is done as it says."""
    case, other = now.case, at / "DIR"
    if wrote := re.search(r"move (\S+) to DIR/(\S+), write (\d+) into DIR/(\S+), and give --load DIR", mend):
        other.mkdir()
        shutil.copytree(wrote[1], other / wrote[2])
        (other / wrote[4]).write_text(wrote[3])
        yield replace(now, folder=other)
    elif wrote := re.search(r"write (\d+) into (\S+), and give --load ([^\s;]+)", mend):
        Path(wrote[2]).write_text(wrote[1])
        yield replace(now, folder=Path(wrote[3]))
    elif wrote := re.search(r"write (\{.*\}) to map.json and give --load OUT, which these make:\n(.*)\n(.*)", mend):
        (at / "map.json").write_text(json.dumps(json.loads(wrote[1])))
        places = {"MID": str(at / "MID"), "OUT": str(at / "OUT"), "map.json": str(at / "map.json")}
        for line in wrote[2], wrote[3]:
            assert main([places.get(word, word) for word in line.split()[1:]]) == 0
        yield replace(now, folder=at / "OUT")
    elif wrote := re.search(r"rename (\S+) to (\S+)", mend):
        (now.folder / wrote[1]).rename(now.folder / wrote[2])
        yield replace(now, folder=now.folder.rename(at / "renamed"))
    elif wrote := re.match(r"give --load (/[^\s;]+)(?: (--ckpt-step \d+))?", mend):
        yield replace(now, folder=Path(wrote[1]), flags=f"{now.flags} {wrote[2] or ''}")
    if wrote := re.search(r"give (--ckpt-step) (\d+)", mend):
        yield replace(now, flags=f"{_without(now.flags, wrote[1])} {wrote[1]} {wrote[2]}")
    if "or give an iteration above 0" in mend:
        yield replace(now, flags=f"{_without(now.flags, '--ckpt-step')} --ckpt-step 5")
        yield replace(now, flags=_without(now.flags, "--ckpt-step"))
    if wrote := re.search(r"give (\w+) in its place", mend):
        yield replace(now, flags=f"{_without(now.flags, '--dist-ckpt-strictness')} --dist-ckpt-strictness {wrote[1]}")
    for wrote in re.finditer(r"\badd (--[a-z-]+(?: log_all)?)", mend):
        yield replace(now, flags=f"{now.flags} {wrote[1]}")
    if wrote := re.search(r"leave out one of (--[a-z-]+) and (--[a-z-]+)", mend):
        yield from (replace(now, flags=_without(now.flags, name)) for name in wrote.groups())
    elif wrote := re.search(r"leave out (--(?!load\b)[a-z-]+)(?!.*to begin anew)", mend):
        yield replace(now, flags=_without(now.flags, wrote[1]))
    if wrote := re.search(r"save it with (--ckpt-format torch_dist(?: --dist-ckpt-optim-fully-reshardable)?)", mend):
        yield _saved_again(now, wrote[1], releases, at)
    if "train the parameters that the saving run has trained" in mend and now.frozen != case.saved.get("frozen", ""):
        yield replace(now, frozen=case.saved.get("frozen", ""))
    if "build the model that was saved" in mend and now.differs:
        yield replace(now, differs="")
    if wrote := re.search(r'accept (?:it|them) by ("trust": \[[^]]*\])', mend):
        yield replace(now, settings="{" + wrote[1] + "}")


def _save(case: Case, form: str, releases: Any, at: Path) -> None:
    job = {"arguments": f"{case.run} ", "saves": [{"save": str(at), **FLAGS[form]}], **case.saved}
    releases[RELEASE].run(case.by, ranks=case.ranks[0], **job)


def _follow(now: Try, releases: Any, at: Path, seen: tuple[str, ...] = ()) -> int:
    """Take each way from here on, and count the loads in which they end; each of these has all that was saved."""
    assert len(seen) <= MOST, seen
    told = now.run(releases)
    assert len({str(one["faults"]) for one in told}) == 1
    if told[0]["refused"] is None:
        _assert_all_is_there(now, told)
        return 1
    faults = "\n".join(f"{where}: {what}" for where, what, _ in told[0]["faults"])
    assert faults + now.words + now.frozen not in seen, f"lines lead round: {now.words}: {faults}"
    seen, ways, number = (*seen, faults + now.words + now.frozen), 0, 0
    for mend in dict.fromkeys(mend for _, _, mend in told[0]["faults"]):
        before = number
        for way in _ways(now, mend, releases, _made(at / str(number))):
            number += 1
            ways += _follow(way, releases, _made(at / f"way{number}"), seen)
        assert number > before or ENDS.search(mend), f"no way is known of {mend!r}"
    return ways


def _assert_all_is_there(now: Try, told: list[dict[str, Any]]) -> None:
    """Each element that this load was asked for is what was saved, but for weights that a warning calls missing."""
    alone = any(flag in now.flags + now.case.run for flag in ("no-load-optim", "--finetune"))
    kinds = ("weight",) if alone else ("weight", "param") + ("exp_avg",) * ("masters-only" not in now.flags)
    said = " ".join(text for text in told[0]["report"]["warnings"] if "is missing from the checkpoint" in text)
    wrong = [text.split()[1].rstrip(":") for one in told for text in one["wrong"] if text.startswith(kinds)]
    assert [key for key in wrong if not said or key.partition("layers.")[2] not in said] == [], now


ENDS = re.compile(
    r"^build the model that was saved|^give the parameters of the model the names|^give --load the folder of --save"
)
"""What is left of lines for a person who has no such model, or no checkpoint."""


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.acts) if "trust" in one else one for one in CASES]
)
def test_lines_lead_to_a_load_or_to_an_end(releases: Any, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folder = _made(tmp_path / "saves") / "saved"
    _save(case, case.form, releases, folder)
    folder = case.change(folder, releases)
    now = Try(case=case, folder=folder, flags=case.flags, differs=case.differs, frozen=case.frozen)
    assert now.run(releases)[0]["refused"] is not None
    assert _follow(now, releases, _made(tmp_path / "ways")) == case.ends
