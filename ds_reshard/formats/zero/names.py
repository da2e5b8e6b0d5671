"""The names of the files in a DeepSpeed checkpoint folder, and the listing of one.

Names from deepspeed/runtime/engine.py `_get_ckpt_name`, `_get_rank_zero_ckpt_name` (0.19.8): the number after
`zero_pp_rank_` is the data-parallel rank, in spite of the name.
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

FileKey = TypeVar("FileKey", int, tuple[int, int])
Parsed = TypeVar("Parsed")

_MODEL = re.compile(r"mp_rank_([0-9]+)_model_states\.pt")
_MODEL_ZERO3 = re.compile(r"zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_model_states\.pt")
OPTIMIZER_FILES = "*_optim_states.pt"
"""A shell pattern of the files that a load of weights alone leaves out."""
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_([0-9]+)(?:-model_([0-9]+))?-model_states\.pt")
_MODEL_GLOB = re.compile(r"(zero_pp_rank_.*_)?mp_rank_.*_model_states\.pt", re.DOTALL)
"""DeepSpeed looks for model files by a `glob` pattern, which also finds these names (`_get_all_ckpt_names`)."""
_OTHER_SAVE = "move the one that does not belong to this save out of the folder"
_EXPERT = re.compile(r"layer_([0-9]+)_expert_([0-9]+)_mp_rank_00_model_states\.pt")
_EP_OPTIM = re.compile(r"expp_rank_([0-9]+)_mp_rank_00_optim_states\.pt")
"""The optimizer of one expert-parallel rank at ZeRO stage 0 (`_get_optimizer_ckpt_name`, runtime/engine.py, 0.19.8)."""
_REFUSED: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"layer_\d+-.*model_states\.pt"),
        "a PipelineModule checkpoint on a grid with other axes (file names of layers)",
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
    """The files of one tag folder by their meaning for ZeRO; sizes in bytes.

    `model` and `optim` are the files of one column of the grid of tensor- and pipeline-parallel ranks, by data-parallel
    rank (0 alone for `model` below stage 3): the first column's, until `column` selects another. `columns` has all
    columns by the number after `mp_rank_`. `layers` are the files of a PipelineModule by layer and tensor-parallel
    rank, `experts` those of experts by layer and number, `ep_optim` the optimizers of expert-parallel ranks at stage 0.
    `rename` turns what a model file says into the names of the run that reads it. `cache` has what was read, as saved,
    from files that all ranks need and few read tensors of; it is sent to other ranks with the listing.
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
    ep_optim: dict[int, str] = field(default_factory=dict)
    rename: Callable[[object], object] | None = None
    cache: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    def column(self, number: int) -> Listing:
        """Return the same folder with another column of the grid selected."""
        of_column = self.columns.get(number, Files({}, {}))
        return replace(self, model=of_column.model, optim=of_column.optim)

    def with_files(self, names: Collection[str]) -> Listing:
        """Return the same folder with only these model and optimizer files."""
        columns = {
            number: Files(*({rank: name for rank, name in of_column.items() if name in names} for of_column in files))
            for number, files in self.columns.items()
        }
        return replace(self, columns=columns).column(0)

    @property
    def tag(self) -> str:
        """Return the folder's own name, also if its path ends with a slash or `..`."""
        return os.path.basename(os.path.abspath(self.folder))

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def read(self, name: str, read: Callable[[str, str], Parsed]) -> Parsed:
        """Return what a file says, by a reader that gets its path and the name of its root."""
        return self._renamed(self.as_saved(name, read))

    def read_once(self, name: str, read: Callable[[str, str], Parsed]) -> Parsed:
        """Read a file as `read` does, once: it is always read by the same reader."""
        if name not in self.cache:
            self.cache[name] = self.as_saved(name, read)
        return self._renamed(cast("Parsed", self.cache[name]))

    def as_saved(self, name: str, read: Callable[[str, str], Parsed]) -> Parsed:
        """Read a file as `read` does, under the names that it has."""
        return read(self.path(name), name.removesuffix(".pt"))

    def _renamed(self, found: Parsed) -> Parsed:
        return found if self.rename is None else cast("Parsed", self.rename(found))


def read_listing(folder: str, files: Mapping[str, int], subfolders: frozenset[str] = frozenset()) -> Listing:
    """Sort the files (name to bytes) of a tag folder; a file that belongs to no single checkpoint is a fault."""
    faults = stray_files(folder, [*files, *subfolders])
    whole_models: dict[int, dict[int, str]] = {}
    partitioned_models: dict[int, dict[int, str]] = {}
    optim_by_prefix: dict[str, dict[int, dict[int, str]]] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int], str] = {}
    ep_optim: dict[int, str] = {}
    for name in sorted(files):
        if match := _MODEL_ZERO3.fullmatch(name):
            faults.extend(_add_file(folder, partitioned_models.setdefault(int(match[2]), {}), int(match[1]), name))
        elif match := _MODEL.fullmatch(name):
            faults.extend(_add_file(folder, whole_models.setdefault(int(match[1]), {}), 0, name))
        elif match := _OPTIM.fullmatch(name):
            column = optim_by_prefix.setdefault(match[1] or "", {}).setdefault(int(match[3]), {})
            faults.extend(_add_file(folder, column, int(match[2]), name))
        elif match := _LAYER.fullmatch(name):
            faults.extend(_add_file(folder, layers, (int(match[1]), int(match[2] or 0)), name))
        elif match := _EXPERT.fullmatch(name):
            faults.extend(_add_file(folder, experts, (int(match[1]), int(match[2])), name))
        elif match := _EP_OPTIM.fullmatch(name):
            faults.extend(_add_file(folder, ep_optim, int(match[1]), name))
        else:
            faults.extend(_unsupported_name_faults(folder, name))
    prefix, shards = next(iter(optim_by_prefix.items())) if optim_by_prefix else ("", {})
    universal = "zero" in subfolders and not shards
    if universal and whole_models:
        partitioned_models = {}  # `ds-reshard convert` also writes one without weights, for the loader of stage 3
    faults.extend(_two_checkpoints(folder, whole_models, partitioned_models, optim_by_prefix))
    models = partitioned_models or whole_models
    columns = {number: Files(models.get(number, {}), shards.get(number, {})) for number in sorted({*models, *shards})}
    return Listing(
        folder=folder,
        nbytes=dict(files),
        partitioned_model=bool(partitioned_models),
        optim_prefix=prefix,
        nvme="offloaded_tensors" in subfolders,
        universal=universal,
        faults=tuple(dict.fromkeys(faults)),
        columns=columns,
        layers=layers,
        experts=experts,
        ep_optim=ep_optim,
    ).column(0)


def column_of(name: str) -> int:
    """Return the column of the grid that a model or optimizer file belongs to; -1 for other files."""
    match = re.search(r"mp_rank_([0-9]+)", name)
    return int(match[1]) if match else -1


def stray_files(folder: str, names: Iterable[str], listed: Collection[str] | None = None) -> list[Fault]:
    """Return a fault for each file that DeepSpeed may open as a shard, and no save writes or `listed` lacks."""
    faults = []
    for name in sorted(names):
        is_ours = any(pattern.fullmatch(name) for pattern in (_MODEL, _MODEL_ZERO3, _OPTIM, _LAYER))
        if (is_ours and listed is not None and name not in listed) or (not is_ours and _MODEL_GLOB.fullmatch(name)):
            what = "holds a file that DeepSpeed would load as part of this save"
            expected = "names as DeepSpeed gives them, such as mp_rank_00_model_states.pt"
            faults.append(CheckpointDamaged.fault(folder, what, expected, repr(name), mend=_OTHER_SAVE))
    return faults


def pattern_in_path(load_dir: str, tag: str) -> list[Fault]:
    """Return a fault if DeepSpeed's `glob` would take the path as a pattern, and may open files of another folder."""
    path = os.path.join(load_dir, tag)
    what = "DeepSpeed does this load, and takes the path as a pattern: it may open another folder"
    mend = "rename the folder; if its name is the tag, write the new name into latest"
    fault = UnsupportedLayout.fault(path, what, "a path without *, ? and [", repr(path), mend=mend)
    return [fault] if glob.escape(path) != path else []


def _add_file(folder: str, files: dict[FileKey, str], key: FileKey, name: str) -> Iterator[Fault]:
    """Add a file; yield a fault if another file has its key."""
    if key in files:
        what = f"holds two files of rank {key}" if isinstance(key, int) else f"holds two files of layer {key[0]}"
        yield CheckpointDamaged.fault(folder, what, files[key], f"{name} as well", mend=_OTHER_SAVE)
    files[key] = name


def _unsupported_name_faults(folder: str, name: str) -> list[Fault]:
    return [
        UnsupportedLayout.fault(folder, what, mend=mend) for pattern, what, mend in _REFUSED if pattern.fullmatch(name)
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
