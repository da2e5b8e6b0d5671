"""One `*model_states.pt` file: weights, shapes, counters, the user's own state.

Keys from deepspeed/runtime/engine.py `_common_checkpoint_state` and `_save_checkpoint` (0.19.8).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

from ds_reshard.containers.torch_zip import Twins, check_root, open_archive
from ds_reshard.errors import damaged, error_of, fail, raise_faults
from ds_reshard.model.facts import describe, text_of
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Shape

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)  # not slotted: what is made of all names is asked for by tensor, and kept
class ModelStates:
    """The header of one model file; `entries` is the whole top level, as records.

    `param_shapes` lists, per param group (per sub-group at stage 3), the trainable parameters in the order of the flat
    buffers: only it has that order. None at stage 0. `versions` are the modules' versions in torch's state dicts, by
    name.
    """

    path: str
    entries: Mapping[str, object]
    module: Mapping[str, TensorRecord]
    objects: Mapping[str, object]
    buffer_names: frozenset[str]
    param_shapes: tuple[dict[str, Shape], ...] | None
    frozen_shapes: dict[str, Shape]
    frozen_fragments: Mapping[str, TensorRecord]
    shared: dict[str, str]
    dp: int
    version: str
    renamed: bool = False
    versions: Mapping[str, object] = field(default_factory=dict)

    def with_names(self, new: Mapping[str, str]) -> ModelStates:
        """Return the same with other names of parameters and buffers, in the same order."""

        def renamed(entries: Mapping[str, Value]) -> dict[str, Value]:
            return {new.get(name, name): value for name, value in entries.items()}

        return replace(
            self,
            module=renamed(self.module),
            objects=renamed(self.objects),
            buffer_names=frozenset(new.get(name, name) for name in self.buffer_names),
            param_shapes=tuple(map(renamed, self.param_shapes)) if self.param_shapes is not None else None,
            frozen_shapes=renamed(self.frozen_shapes),
            frozen_fragments=renamed(self.frozen_fragments),
            shared={name: new.get(first, first) for name, first in renamed(self.shared).items()},
            versions={**self.versions, **self._renamed_versions(new)},
            renamed=True,
        )

    def _renamed_versions(self, new: Mapping[str, str]) -> dict[str, object]:
        """Return the versions of modules whose tensors keep the last part of their names."""
        ends = [(old.rpartition("."), name.rpartition(".")) for old, name in new.items()]
        same = {name[0]: old[0] for old, name in ends if old[2] == name[2]}
        return {module: self.versions[old] for module, old in same.items() if old in self.versions}

    @cached_property
    def trainable(self) -> Mapping[str, Shape]:
        """Return every trainable parameter's shape; empty at stage 0."""
        return {name: shape for group in self.param_shapes or () for name, shape in group.items()}

    @property
    def config(self) -> Mapping[str, object]:
        """Return the saved DeepSpeed config, empty if it was not saved as a dict."""
        saved = self.entries.get("ds_config")
        return saved if isinstance(saved, dict) else {}

    @property
    def in_fp16(self) -> bool:
        """True if the saved run trained in fp16, and so scaled its loss."""
        return ElementType.FLOAT16 in self._types

    @cached_property
    def _types(self) -> set[ElementType]:
        names = self.trainable or self.module.keys() - self.buffer_names
        return {self.module[name].dtype for name in names if name in self.module}

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Return frozen parameters that stage 3 saved quantized, without the scales that belong to them.

        (`zero_quantized_nontrainable_weights`; `_get_param_fragment_func`, runtime/engine.py, 0.19.8.) Their empty
        entries in the module have the parameters' types.
        """
        fragments = [(name, part.dtype) for name, part in self.frozen_fragments.items() if name in self.module]
        return frozenset(n for n, dtype in fragments if dtype in _QUANTIZED and self.module[n].dtype is not dtype)

    @property
    def masters_lag(self) -> bool:
        """True if masters lag behind the weights: ZenFlow steps the columns that it selects in the weights alone.

        The masters follow at its next selection (`sync_fp32_param_from_gpu`, runtime/zenflow, 0.19.8).
        """
        return section(self.config, "zero_optimization").get("zenflow") is not None


_QUANTIZED = (ElementType.INT8, ElementType.UINT8)
QUANTIZED = "was saved quantized, and its scales are in no file"
LAGGING = "was saved under ZenFlow: some masters lag behind their weights, whose moments are in no file"


def section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a section of a config, empty if it is missing or no dict."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def read_model_states(path: str, stem: str) -> ModelStates:
    """Read one model file: directory and pickle only.

    Raises CheckpointDamaged if it is not what its name says, or lacks an entry that every DeepSpeed model file has.
    """
    return _model_states(path, read_entries(path, stem))


_CACHED_TENSORS = 1 << 15
Result = TypeVar("Result")


class IdentityCache(Generic[Result]):
    """Results made from recent values, by the values' identity. Thread-safe.

    The newest results are kept, up to 32,768 tensors together, or a single larger one.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, int, Result]] = {}
        self._lock = threading.Lock()

    def get(self, value: object, tensors: int, make: Callable[[], Result]) -> Result:
        """Return what `make` returns for this value, or returned before; the value names this many tensors."""
        with self._lock:
            entry = self._made.get(id(value))
        if entry is None:
            entry = value, tensors, make()  # holds the value: an id is unique only while its object lives
            with self._lock:
                self._made[id(value)] = entry
                while sum(cached[1] for cached in self._made.values()) > max(tensors, _CACHED_TENSORS):
                    del self._made[next(iter(self._made))]
        return entry[2]


class ModelFiles:
    """Reads the model files of one save; entries that ranks share are read once."""

    def __init__(self) -> None:
        self._twins = Twins()
        self._states = IdentityCache[ModelStates]()

    def read(self, path: str, stem: str) -> ModelStates:
        """Read as `read_model_states` does; equal values may be the objects of a file that was read before."""
        entries = read_entries(path, stem, self._twins)
        module = entries.get("module")
        tensors = len(module) if isinstance(module, dict) else 0
        return replace(self._states.get(entries, tensors, lambda: _model_states(path, entries)), path=path)


def _model_states(path: str, entries: Mapping[str, object]) -> ModelStates:
    faults = [
        damaged(path, f"has no entry {key!r}", "a DeepSpeed model file", f"entries {sorted(entries)[:8]}")
        for key in ("module", "dp_world_size", "global_steps")
        if key not in entries
    ]
    module = entries.get("module") or {}
    if not isinstance(module, dict):
        faults.append(damaged(path, "entry 'module' is not a state dict", "a dict", type(module).__name__))
    raise_faults(faults, subject="reading a checkpoint")
    assert isinstance(module, dict)
    shared_params = _mapping(path, "shared_params", entries.get("shared_params") or {})
    shared = {str(name): text_of(first) for name, first in shared_params.items()}
    tensors = {name: value for name, value in module.items() if isinstance(value, TensorRecord)}
    # exclude_frozen_parameters leaves out a frozen weight by its first name alone (`module_state_dict` in
    # runtime/engine.py, 0.19.8): at stage 3 its second name stands for something that is in no file.
    unsaved = {name for name, value in tensors.items() if not value.numel and shared.get(name, name) not in module}
    return ModelStates(
        path=path,
        entries=entries,
        module={name: value for name, value in tensors.items() if name not in unsaved},
        objects={name: value for name, value in module.items() if not isinstance(value, TensorRecord)},
        buffer_names=frozenset(_texts(path, entries.get("buffer_names") or ())),
        param_shapes=_groups(path, entries.get("param_shapes")),
        frozen_shapes=_shapes(path, "frozen_param_shapes", entries.get("frozen_param_shapes") or {}),
        frozen_fragments=_tensors(path, entries.get("frozen_param_fragments") or {}),
        shared=shared,
        dp=positive(path, "dp_world_size", entries["dp_world_size"]),
        version=text_of(entries.get("ds_version", "unknown")),
        versions={str(k): v for k, v in _mapping(path, "module", getattr(module, "_metadata", {})).items()},
    )


def read_entries(path: str, stem: str, twins: Twins | None = None) -> Mapping[str, object]:
    """Return the top level of a model file, as records; raises CheckpointDamaged if it has none."""
    with open_archive(path) as archive:
        check_root(path, stem, archive.root)
        entries = archive.load(twins=twins)
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise error_of(
            [damaged(path, "is not a DeepSpeed model file", "a dict of entries", type(entries).__name__)],
            subject="reading a checkpoint",
        )
    return entries


def _texts(path: str, value: object) -> Sequence[str]:
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return value
    raise fail(path, "entry 'buffer_names' is not a list of names", "names", type(value).__name__)


def _mapping(path: str, entry: str, value: object) -> Mapping[object, object]:
    if isinstance(value, dict):
        return value
    raise fail(path, f"entry {entry!r} is not a dict", "a dict", type(value).__name__)


def _shapes(path: str, entry: str, value: object) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, shape in _mapping(path, entry, value).items():
        well_formed = isinstance(shape, list | tuple) and all(
            isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
        )
        if not isinstance(name, str) or not isinstance(shape, list | tuple) or not well_formed:
            raise fail(
                path, f"entry {entry!r} is malformed", "parameter names and shapes", f"{name!r}: {describe(shape)}"
            )
        shapes[name] = tuple(shape)
    return shapes


def _groups(path: str, value: object) -> tuple[dict[str, Shape], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise fail(path, "entry 'param_shapes' is not a list", "one dict per param group", type(value).__name__)
    return tuple(_shapes(path, "param_shapes", group) for group in value)


def _tensors(path: str, value: object) -> dict[str, TensorRecord]:
    tensors: dict[str, TensorRecord] = {}
    for name, tensor in _mapping(path, "frozen_param_fragments", value).items():
        if not isinstance(tensor, TensorRecord):
            raise fail(path, "entry 'frozen_param_fragments' is malformed", "tensors", type(tensor).__name__)
        tensors[str(name)] = tensor
    return tensors


def positive(path: str, entry: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise fail(path, f"entry {entry!r} is malformed", "a positive int", describe(value))
