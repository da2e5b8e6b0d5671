"""What the files of a nanotron checkpoint are called, and what a listing of them says.

Names from nanotron's serialize/optimizer.py (`optimizer_filename`, `lr_scheduler_filename`), serialize/utils.py
(`get_path`), serialize/random.py (`save_random_states`) and constants.py, at commit 2411b02; up to checkpoint version
1.2 there is one `lr_scheduler.pt`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged

META, OPTIMIZER_CONFIG, CONFIG = "checkpoint_metadata.json", "optimizer/optimizer_config.json", "config.yaml"
MODEL_CONFIG = "model_config.json"
OLD_SCHEDULER = "lr_scheduler/lr_scheduler.pt"
LATEST = "latest.txt"
"""The file that names the last step (trainer.py)."""
_RANKS = r"pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)_exp-(\d+)-of-(\d+)\.pt"
_STATE = re.compile(rf"(optimizer|lr_scheduler)/(?:optimizer|lr_scheduler)_{_RANKS}")
_MODEL = re.compile(
    r"model/(?P<folder>.+/)?model_(?P<leaf>[^/]+?)"
    r"(?:_pp-rank-(?P<pp>\d+)-of-(?P<pps>\d+)_tp-rank-(?P<tp>\d+)-of-(?P<tps>\d+)"
    r"(?:_exp-rank-(?P<exp>\d+)-of-(?P<exps>\d+))?)?\.safetensors"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Rank:
    """A rank's place in the topology; `dp` is 0 where one file serves all data-parallel ranks."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The sizes that file names say: `dp` is None where optimizer files are not cut over it (ZeRO-0)."""

    pp: int
    tp: int
    dp: int | None
    exp: int

    @property
    def dp_files(self) -> int:
        """How many optimizer files there are of each pipeline and tensor rank."""
        return self.dp or 1

    @property
    def ranks(self) -> Iterator[Rank]:
        """The ranks that have files, in the order of their shard numbers."""
        for pp in range(self.pp):
            for tp in range(self.tp):
                for dp in range(self.dp_files):
                    yield Rank(pp=pp, tp=tp, dp=dp)

    def shard(self, rank: Rank) -> int:
        """The number of a rank's optimizer file."""
        return (rank.pp * self.tp + rank.tp) * self.dp_files + rank.dp

    def rank(self, shard: int) -> Rank:
        """The rank whose optimizer file has that number."""
        row, dp = divmod(shard, self.dp_files)
        return Rank(pp=row // self.tp, tp=row % self.tp, dp=dp)


def state_name(kind: str, topology: Topology, rank: Rank) -> str:
    """`optimizer_filename` or `lr_scheduler_filename`, below the checkpoint's folder."""
    dp = f"_dp-{rank.dp}-of-{topology.dp}" if topology.dp is not None else ""
    ranks = f"pp-{rank.pp}-of-{topology.pp}{dp}_tp-{rank.tp}-of-{topology.tp}_exp-0-of-{topology.exp}"
    return f"{kind}/{kind}_{ranks}.pt"


def weight_name(name: str, shard: tuple[int, int, int, int] | None) -> str:
    """`get_path` below the checkpoint's folder; `shard` is (pp rank, pp, tp rank, tp) of a sharded parameter."""
    *folders, leaf = name.split(".")
    ranks = "_pp-rank-{}-of-{}_tp-rank-{}-of-{}".format(*shard) if shard is not None else ""
    return "/".join(["model", *folders, f"model_{leaf}{ranks}.safetensors"])


@dataclass(frozen=True, slots=True, kw_only=True)
class NanotronListing:
    """The files of one checkpoint folder, by their paths below it; sizes in bytes.

    `weights` has of each parameter its files by tensor-parallel rank, None where it is not sharded; `weight_stages` the
    pipeline rank that wrote a sharded one.
    """

    folder: str
    nbytes: Mapping[str, int]
    optimizer: Mapping[Rank, str] = field(default_factory=dict)
    schedulers: Mapping[Rank, str] = field(default_factory=dict)
    weights: Mapping[str, Mapping[int | None, str]] = field(default_factory=dict)
    weight_stages: Mapping[str, int] = field(default_factory=dict)
    topology: Topology | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def tag(self) -> str:
        """The step, as its folder is called."""
        return os.path.basename(os.path.abspath(self.folder))

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def is_nanotron(folder: str) -> bool:
    """Whether the folder is one checkpoint of nanotron, or looks as if it had been one."""
    if folders.is_file(f"{folder}/{META}") or folders.is_file(f"{folder}/{OPTIMIZER_CONFIG}"):
        return True
    return folders.is_file(f"{folder}/{MODEL_CONFIG}") and folders.is_folder(f"{folder}/model")


def read_listing(folder: str, *, optimizer: bool = True) -> NanotronListing:
    """Sort the files of a checkpoint folder; what cannot be read as one checkpoint is a fault.

    `optimizer=False` leaves out the files of the optimizer and its scheduler.
    """
    nbytes = folders.files_below(folder)
    if not optimizer:
        nbytes = {name: size for name, size in nbytes.items() if not name.startswith(("optimizer/", "lr_scheduler/"))}
    states: dict[str, StateFiles] = {"optimizer": {}, "lr_scheduler": {}}
    weights: dict[str, dict[int | None, str]] = {}
    homes: dict[str, int] = {}
    faults: list[Fault] = []
    for name in sorted(nbytes):
        if match := _STATE.fullmatch(name):
            kind, (pp, pps, dp, dps, tp, tps, exp, exps) = match[1], (int(text or 0) for text in match.groups()[1:])
            sizes = Topology(pp=pps, tp=tps, dp=dps if match[5] is not None else None, exp=exps)
            files = states[kind].setdefault(sizes, {})
            if not exp:
                files[Rank(pp=pp, tp=tp, dp=dp)] = name
        elif match := _MODEL.fullmatch(name):
            faults += _add_weight(folder, weights, homes, name, match)
        if not nbytes[name] and name.endswith((".pt", ".safetensors")):
            faults.append(damaged(f"{folder}/{name}", "is empty", "a file of torch or safetensors", "0 bytes"))
    topology, wrong = _topology(folder, states["optimizer"])
    schedulers, mixed = _schedulers(folder, states["lr_scheduler"], nbytes)
    return NanotronListing(
        folder=folder,
        nbytes=nbytes,
        topology=topology,
        weights=weights,
        faults=(*faults, *wrong, *mixed),
        optimizer=_of_all(states["optimizer"]),
        schedulers=schedulers,
        weight_stages=homes,
    )


StateFiles = dict[Topology, dict[Rank, str]]
"""Files of the optimizer, or of its scheduler, by the sizes and the rank in their names."""


def _of_all(files: StateFiles) -> dict[Rank, str]:
    return {rank: name for of_topology in files.values() for rank, name in of_topology.items()}


def _add_weight(
    folder: str, weights: dict[str, dict[int | None, str]], homes: dict[str, int], name: str, match: re.Match[str]
) -> Iterator[Fault]:
    """Add a weight file to `weights` by parameter and tensor-parallel rank, and its pipeline rank to `homes`.

    Yields a fault if the file is an expert's, or conflicts with one that was added before.
    """
    if match["exp"] is not None:
        yield experts(f"{folder}/{name}", int(match["exps"]))
        return
    if ".safetensors" in match["leaf"]:
        yield UnsupportedLayout.fault(
            f"{folder}/{name}",
            "has the doubled name of nanotron in April 2024",
            mend="rename the files with scripts/fix_checkpoint_bad_naming.py of nanotron",
        )
        return
    parameter = (match["folder"] or "").replace("/", ".") + match["leaf"]
    files = weights.setdefault(parameter, {})
    at = int(match["tp"]) if match["tp"] is not None else None
    if match["pp"] is not None:
        homes[parameter] = int(match["pp"])
    if at in files or (files and (at is None) != (None in files)):
        other = next(iter(files.values()))
        yield damaged(f"{folder}/{name}", "is of another save than a file beside it", "files of one topology", other)
    files[at] = name


def experts(where: str, size: int) -> Fault:
    """A checkpoint of expert parallelism, of which nanotron's own loader overwrites one expert with another."""
    return UnsupportedLayout.fault(
        where,
        "was saved with expert parallelism",
        "expert_parallel_size 1",
        str(size),
        mend="load it with nanotron alone, without ds_reshard's hooks, at the topology that saved it",
    )


def _topology(folder: str, files: StateFiles) -> tuple[Topology | None, list[Fault]]:
    """What the optimizer's file names say, and which of their files are missing."""
    if len(files) > 1:
        found = ", ".join(sorted(f"pp {one.pp} dp {one.dp} tp {one.tp} exp {one.exp}" for one in files))
        what, mend = "holds the files of several topologies", "move the files of the older save out of the folder"
        return None, [CheckpointDamaged.fault(f"{folder}/optimizer", what, "one", found, mend=mend)]
    for topology, held in files.items():
        if topology.exp != 1:
            return topology, [experts(f"{folder}/optimizer", topology.exp)]
        ranks, what = set(topology.ranks), "is of a rank beyond the size in its name"
        beyond = (name for rank, name in held.items() if rank not in ranks)
        faults = [damaged(f"{folder}/{name}", what, "a rank below it", name) for name in beyond]
        return topology, [*_missing(folder, "optimizer", topology, held), *faults]
    return None, []


def _missing(folder: str, kind: str, topology: Topology, held: Mapping[Rank, str]) -> Iterator[Fault]:
    for name in (state_name(kind, topology, rank) for rank in topology.ranks if rank not in held):
        yield damaged(f"{folder}/{name}", "is missing", f"{len(held)} files and this", "no file")


def _schedulers(folder: str, files: StateFiles, nbytes: Mapping[str, int]) -> tuple[Mapping[Rank, str], list[Fault]]:
    """The scheduler's files; those of two namings are of two saves."""
    old = OLD_SCHEDULER in nbytes
    if len(files) + old > 1:
        fault = CheckpointDamaged.fault(
            f"{folder}/lr_scheduler",
            "holds the schedulers of several saves",
            f"files of one naming scheme and one topology (nanotron wrote {OLD_SCHEDULER} before November 2024)",
            ", ".join(sorted(name for name in nbytes if name.startswith("lr_scheduler/"))[:6]),
            mend="move the files of the older save out of the folder",
        )
        return {}, [fault]
    if old:
        return {Rank(pp=0, tp=0, dp=0): OLD_SCHEDULER}, []
    missing = [fault for one, held in files.items() for fault in _missing(folder, "lr_scheduler", one, held)]
    return _of_all(files), missing
