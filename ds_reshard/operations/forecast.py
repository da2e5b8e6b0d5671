"""What is foreseen of a load before its run is started: the answer, and what the folder alone tells of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ds_reshard.containers import folders
from ds_reshard.errors import Fault, ReshardError, faults_of
from ds_reshard.resume.lr_preview import ComingRun
from ds_reshard.resume.report import ResumeReport

# What frameworks call the random states of each rank, beside DeepSpeed's files: transformers' Trainer and accelerate.
_RANDOM = re.compile(r"(?:rng_state_|random_states_)(\d+)\.(?:pth|pkl)")
_POSITION = re.compile(r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What one rank reads, and what its engine holds: masters and states of the optimizer, and weights.

    `offloaded_nbytes` of these lie in the host's memory, or on its disks.
    """

    rank: int
    read_nbytes: int
    files: tuple[str, ...]
    optimizer_nbytes: int
    weights_nbytes: int
    offloaded_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a load will do: whether it loads at all, by whom, what it refuses, and what it costs.

    `faults` are every reason why it cannot load; without any it does. `folder` are faults of the folder that this load
    does not meet. `costs` are those of some ranks: all of the first node's, where they are not too many, and the last.
    `buffer_nbytes` is the host memory a rank beside what its engine holds, 0 where the framework reads; `tag` is which
    of the folder's checkpoints the run itself names.
    """

    saved: str
    run: str
    loader: str = ""
    faults: tuple[Fault, ...] = ()
    folder: tuple[Fault, ...] = ()
    pickles: str = ""
    report: ResumeReport | None = None
    rates: ComingRun | None = None
    batch: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    costs: tuple[RankCost, ...] = ()
    world: int = 1
    nodes: int = 1
    buffer_nbytes: int = 0
    bandwidth: float = 1e9
    tag: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """One line: yes, and who loads; or no, and the first reason."""
        saved = f"{self.saved} as " if self.saved else ""
        if self.loads:
            return f"yes: {self.loader} loads {saved}{self.run}"
        others = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"no: {saved}{self.run}: {self.faults[0].line()}{others}"

    @property
    def node_nbytes(self) -> int:
        """Bytes that the ranks of the first node read together, those that were not planned taken for the average."""
        a_node = -(-self.world // self.nodes)
        planned = [cost.read_nbytes for cost in self.costs if cost.rank < a_node]
        return round(sum(planned) / len(planned) * a_node) if planned else 0

    @property
    def node_files(self) -> int:
        """How many files these ranks open, those of ranks that were not planned not counted."""
        a_node = -(-self.world // self.nodes)
        return len({name for cost in self.costs if cost.rank < a_node for name in cost.files})

    def memory(self, cost: RankCost) -> tuple[int, int]:
        """Bytes of a rank while it loads, in the host's memory and on its GPU.

        What its engine holds, and buffers in both; a framework that reads holds its files in the host's memory instead.
        """
        held = cost.optimizer_nbytes + cost.weights_nbytes - cost.offloaded_nbytes
        return cost.offloaded_nbytes + (self.buffer_nbytes or cost.read_nbytes), held + self.buffer_nbytes * bool(held)

    @property
    def seconds(self) -> float:
        """How long the first node reads at `bandwidth` bytes a second."""
        return self.node_nbytes / self.bandwidth

    def to_json(self) -> dict[str, object]:
        return {
            "loads": self.loads,
            "verdict": self.verdict,
            "loader": self.loader,
            "saved": self.saved,
            "run": self.run,
            "faults": [asdict(fault) for fault in self.faults],
            "folder": [asdict(fault) for fault in self.folder],
            "pickles": self.pickles,
            "report": self.report.to_json() if self.report is not None else None,
            "rates": self.rates.to_json() if self.rates is not None else None,
            "batch": {name: {"checkpoint": saved, "run": run} for name, (saved, run) in self.batch.items()},
            "cost": {
                "ranks": [self._cost_to_json(cost) for cost in self.costs],
                "node_nbytes": self.node_nbytes,
                "node_files": self.node_files,
                "buffer_nbytes": self.buffer_nbytes,
                "bandwidth": self.bandwidth,
                "seconds": self.seconds,
            },
            "notes": list(self.notes),
        }

    def _cost_to_json(self, cost: RankCost) -> dict[str, object]:
        host, device = self.memory(cost)
        return {**asdict(cost), "host_nbytes": host, "device_nbytes": device}


def with_folder(made: Forecast, path: str, *, tag: str | None, deep: bool) -> Forecast:
    """The forecast with what the folder tells: its faults, its pickles, the random states beside it.

    With `deep` every byte is read and checked; what is then wrong is a reason not to start.
    """
    from ds_reshard.operations import inspect, verify

    try:
        found = inspect(path, tag=tag)
    except ReshardError as error:
        return made if made.faults else replace(made, faults=tuple(faults_of(error)))
    told = {(fault.where, fault.what) for fault in made.faults}
    others = tuple(fault for fault in found.faults if (fault.where, fault.what) not in told)
    unsafe = sum(fault.error in ("UnsafePickle", "TrustRequired") for fault in found.faults)
    pickles = f"{found.pickles} pickles searched, "
    pickles += f"{unsafe} would act or need trust" if unsafe else "nothing in them would act"
    made = replace(made, folder=others, pickles=pickles, notes=(*made.notes, *_random_states(path, made.world)))
    if not deep:
        return made
    seen = verify(path, tag=tag, deep=True).faults
    more = tuple(fault for fault in seen if (fault.where, fault.what) not in told)
    return replace(made, faults=(*made.faults, *more), folder=())


def _random_states(path: str, world: int) -> Iterator[str]:
    """What the folder holds of random states and of the position in the data, beside DeepSpeed's own files."""
    names = folders.files(path)
    ranks = {int(match.group(1)) for name in names if (match := _RANDOM.fullmatch(name))}
    if ranks:
        ends = [next((rank for rank in way if rank not in ranks), -1) for way in (range(world), reversed(range(world)))]
        said = f"ranks {ends[0]} to {ends[1]} begin with their own" if ends[0] >= 0 else "one for each rank"
        yield f"random states of {len(ranks)} ranks: {said}"
    if "trainer_state.json" in names:
        yield "trainer_state.json rules the Trainer's step count and its position in the data"
    for name in sorted(filter(_POSITION.fullmatch, names)):
        yield f"{name} is accelerate's position in the data, which it loads itself"


def shown_files(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({os.path.basename(path) for path in paths}))
