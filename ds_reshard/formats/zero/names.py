"""What the files of a DeepSpeed checkpoint folder are called, and what a listing of it says.

Names from deepspeed/runtime/engine.py `_get_ckpt_name`, `_get_rank_zero_ckpt_name` (0.19.8): the number
after `zero_pp_rank_` is the data-parallel rank, whatever the name suggests.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout

Place = TypeVar("Place", int, tuple[int, int])
Told = TypeVar("Told")

_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_MODEL_ZERO3 = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
OPTIMIZER_FILES = "*_optim_states.pt"
"""The files of a folder that a load of weights alone leaves out, as a pattern of the shell."""
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)(?:-model_([0-9]+))?-model_states\.pt")
_MODEL_AS_FOUND = re.compile(r"(zero_pp_rank_.*_)?mp_rank_.*_model_states\.pt", re.DOTALL)
"""What `glob` finds for DeepSpeed, which looks for model files by pattern (`_get_all_ckpt_names`)."""
_OTHER_SAVE = "move the one that does not belong to this save out of the folder"
_EXPERT = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_00_model_states\.pt")
_PLACE = re.compile(r"expp_rank_([0-9]+)_mp_rank_00_optim_states\.pt")
"""The optimizer of one expert-parallel rank at ZeRO stage 0 (`_get_optimizer_ckpt_name`, runtime/engine.py, 0.19.8)."""
_FOREIGN: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"layer_\d+-.*model_states\.pt"),
        "a PipelineModule checkpoint on a grid with axes of its own (file names of layers)",
        "save it with PipeDataParallelTopology or PipeModelDataParallelTopology",
    ),
    (
        re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_.*optim_states\.pt"),
        "a mixture-of-experts checkpoint of an old release, or with tensor parallelism (expert files)",
        "load it at the expert- and data-parallel sizes it was saved with",
    ),
)


class Files(NamedTuple):
    """The files of one column of the grid, by data-parallel rank."""

    model: dict[int, str]
    optim: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of one tag folder, sorted into what ZeRO calls them; sizes in bytes.

    `model` is keyed by data-parallel rank (0 alone below stage 3), `optim` likewise: those of one column of the grid of
    tensor- and pipeline-parallel ranks, the first until another is taken. `columns` has them of all, by the number
    after `mp_rank_`, `layers` the files of a PipelineModule, by layer and tensor-parallel rank, `experts` those of
    experts, by layer and number, and `places` the optimizers of expert-parallel ranks at stage 0. `rename` is what a
    model file says, under the names of the run that reads it. `known` has what was read, as it is there, of files that
    all ranks need to know and few read tensors of; it is told to other ranks with the listing.
    """

    folder: str
    nbytes: Mapping[str, int]
    model: dict[int, str] = field(default_factory=dict)
    optim: dict[int, str] = field(default_factory=dict)
    partitioned_model: bool = False
    optim_prefix: str = ""
    nvme: bool = False
    universal: bool = False
    faults: tuple[Fault, ...] = ()
    columns: dict[int, Files] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int], str] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    rename: Callable[[object], object] | None = None
    known: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    def column(self, number: int) -> Listing:
        """The same folder, seen from another column of the grid."""
        files = self.columns.get(number, Files({}, {}))
        return replace(self, model=files.model, optim=files.optim)

    def with_files(self, names: Collection[str]) -> Listing:
        """The same folder with these model and optimizer files alone."""
        columns = {
            number: Files(*({rank: name for rank, name in of.items() if name in names} for of in files))
            for number, files in self.columns.items()
        }
        return replace(self, columns=columns).column(0)

    @property
    def tag(self) -> str:
        """The folder's own name, however it was reached: with a slash at its end, or through `..`."""
        return os.path.basename(os.path.abspath(self.folder))

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def read(self, name: str, read: Callable[[str, str], Told]) -> Told:
        """What a file says, by a reader that is given its path and the name of its root."""
        return self._renamed(self.as_saved(name, read))

    def know(self, name: str, read: Callable[[str, str], Told]) -> Told:
        """The same, read once: a file has one such reader."""
        if name not in self.known:
            self.known[name] = self.as_saved(name, read)
        return self._renamed(cast("Told", self.known[name]))

    def as_saved(self, name: str, read: Callable[[str, str], Told]) -> Told:
        """The same, under the names that the file has."""
        return read(self.path(name), name.removesuffix(".pt"))

    def _renamed(self, found: Told) -> Told:
        return found if self.rename is None else cast("Told", self.rename(found))


def read_listing(folder: str, files: Mapping[str, int], subfolders: frozenset[str] = frozenset()) -> Listing:
    """Sort the files (name to bytes) of a tag folder; what cannot be read as one checkpoint is a fault."""
    faults = stray_files(folder, [*files, *subfolders])
    whole: dict[int, dict[int, str]] = {}
    partitioned: dict[int, dict[int, str]] = {}
    optim: dict[str, dict[int, dict[int, str]]] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int], str] = {}
    places: dict[int, str] = {}
    for name in sorted(files):
        if match := _MODEL_ZERO3.fullmatch(name):
            faults.extend(_taken(folder, partitioned.setdefault(int(match[2]), {}), int(match[1]), name))
        elif match := _MODEL.fullmatch(name):
            faults.extend(_taken(folder, whole.setdefault(int(match[1]), {}), 0, name))
        elif match := _OPTIM.fullmatch(name):
            column = optim.setdefault(match[1] or "", {}).setdefault(int(match[3]), {})
            faults.extend(_taken(folder, column, int(match[2]), name))
        elif match := _LAYER.fullmatch(name):
            faults.extend(_taken(folder, layers, (int(match[1]), int(match[2] or 0)), name))
        elif match := _EXPERT.fullmatch(name):
            faults.extend(_taken(folder, experts, (int(match[1]), int(match[2])), name))
        elif match := _PLACE.fullmatch(name):
            faults.extend(_taken(folder, places, int(match[1]), name))
        else:
            faults.extend(_foreign(folder, name))
    prefix, shards = next(iter(optim.items())) if optim else ("", {})
    universal = "zero" in subfolders and not shards
    if universal and whole:
        partitioned = {}  # `ds-reshard convert` writes one beside it, without weights, for the loader of stage 3
    faults.extend(_two_checkpoints(folder, whole, partitioned, optim))
    models = partitioned or whole
    columns = {number: Files(models.get(number, {}), shards.get(number, {})) for number in sorted({*models, *shards})}
    return Listing(
        folder=folder,
        nbytes=dict(files),
        partitioned_model=bool(partitioned),
        optim_prefix=prefix,
        nvme="offloaded_tensors" in subfolders,
        universal=universal,
        faults=tuple(dict.fromkeys(faults)),
        columns=columns,
        layers=layers,
        experts=experts,
        places=places,
    ).column(0)


def column_of(name: str) -> int:
    """The column of the grid that a model or optimizer file belongs to; -1 of others."""
    match = re.search(r"mp_rank_([0-9]+)", name)
    return int(match[1]) if match else -1


def stray_files(folder: str, names: Iterable[str], listed: Collection[str] | None = None) -> list[Fault]:
    """Names that DeepSpeed may open as a shard, and no save gives; with `listed`, also those that are not in it."""
    faults = []
    for name in sorted(names):
        own = any(pattern.fullmatch(name) for pattern in (_MODEL, _MODEL_ZERO3, _OPTIM, _LAYER))
        if (own and listed is not None and name not in listed) or (not own and _MODEL_AS_FOUND.fullmatch(name)):
            what = "holds a file that DeepSpeed would take for one of this save"
            expected = "names as DeepSpeed gives them, such as mp_rank_00_model_states.pt"
            faults.append(CheckpointDamaged.fault(folder, what, expected, repr(name), mend=_OTHER_SAVE))
    return faults


def pattern_in_path(load_dir: str, tag: str) -> list[Fault]:
    """A path that DeepSpeed, which gives it to `glob`, takes for a pattern: it may open the files of another folder."""
    path = os.path.join(load_dir, tag)
    what = "DeepSpeed, to which this load is left, takes this path for a pattern and may open another folder"
    mend = "rename the folder, and where its name is the tag write the new one into latest"
    fault = UnsupportedLayout.fault(path, what, "a path without *, ? and [", repr(path), mend=mend)
    return [fault] if glob.escape(path) != path else []


def _taken(folder: str, files: dict[Place, str], place: Place, name: str) -> Iterator[Fault]:
    """Enter a file; a fault where another has its place."""
    if place in files:
        what = f"holds two files of rank {place}" if isinstance(place, int) else f"holds two files of layer {place[0]}"
        yield CheckpointDamaged.fault(folder, what, files[place], f"{name} as well", mend=_OTHER_SAVE)
    files[place] = name


def _foreign(folder: str, name: str) -> list[Fault]:
    return [
        UnsupportedLayout.fault(folder, what, mend=mend) for pattern, what, mend in _FOREIGN if pattern.fullmatch(name)
    ]


def _two_checkpoints(
    folder: str, whole: Mapping[int, object], partitioned: Mapping[int, object], optim: Mapping[str, object]
) -> Iterator[Fault]:
    mend = "move the files of the older run out of the folder, or load another tag"
    wrong = partial(CheckpointDamaged.fault, folder, mend=mend)
    if whole and partitioned:
        expected = "either mp_rank_* (stages 0 to 2) or zero_pp_rank_* (stage 3)"
        yield wrong("holds the model files of two checkpoints", expected, "both")
    if len(optim) > 1:
        yield wrong(
            "holds the optimizer files of two checkpoints", "one file prefix", ", ".join(map(repr, sorted(optim)))
        )
