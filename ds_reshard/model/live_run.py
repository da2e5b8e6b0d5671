"""What a load asks of a run, as plain values: of a run that goes on, or of one that is still to be started.

A host reads its engine once to make one, or computes it from a configuration; nothing that decides reads anything else
of a framework. The memory of a run has names: "module/NAME" is a tensor of its module, "frozen/NAME" the part that a
rank keeps of a frozen parameter, "fp32/N" and "weight/N" are the masters and the weights of flat buffer N, "exp_avg/N"
a state beside them. Tensors are looked up by these names when bytes move, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Part, Shape


class LocalShard(NamedTuple):
    """What this rank has of a whole tensor: all of it, or parts of it that lie in its own."""

    shape: Shape
    parts: tuple[Part, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or a buffer of a rank's module, and its shape before data-parallel ranks partition it.

    `names` are those of a parameter, none of a buffer; `entries` are those that the module's state dict has for it.
    `dtype` is the type of what this rank keeps, None for a type without a name: of a part if the tensor is
    `partitioned`, which is nothing without its scale if it is `quantized`.
    """

    names: tuple[str, ...]
    entries: tuple[str, ...]
    shape: Shape
    dtype: ElementType | None
    trainable: bool = False
    contiguous: bool = True
    partitioned: bool = False
    quantized: bool = False


Unloaded = tuple[object, frozenset[str]]
"""The value of an entry that no module loads, and the names of the tensors that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModule:
    """The module of one rank: its tensors, by the names that they have in the whole model.

    `names` are all entries of its state dict, `others` the shapes of those that are not read as tensors. `unloaded` are
    entries that no module loads, `extra` those of modules that load an extra state. `loads_itself` says that some
    module takes part in loading; `versioned` are those that do so by the version of what was saved.
    """

    tensors: tuple[LiveTensor, ...]
    names: frozenset[str]
    other_shapes: Mapping[str, Shape] = field(default_factory=dict)
    unloaded: Mapping[str, Unloaded] = field(default_factory=dict)
    extra_state_modules: tuple[str, ...] = ()
    has_load_hooks: bool = False
    versioned: Mapping[str, int] = field(default_factory=dict)

    def parameters(self) -> dict[str, LiveTensor]:
        """The parameters, by their first names."""
        return {one.names[0]: one for one in self.tensors if one.names}

    def shapes(self) -> dict[str, Shape]:
        """The shapes of the parameters, by their first names."""
        return {one.names[0]: one.shape for one in self.tensors if one.names}


class Buffer(Protocol):
    """What any host's flat buffer has: the parameters in it, and its number and param group."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def group(self) -> int: ...


B = TypeVar("B", bound=Buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer(Generic[B]):
    """An optimizer in whatever wrapper, seen alike.

    `kind` names the wrapper; `rank` of `dp` share the buffers, and one rank has all where each holds all (stage 0).
    `groups` are the param groups as a state dict has them, `order` the trainable parameters of each in the order in
    which the script gave them. `name` is the class of what steps, `known` are the values that its groups know;
    `decoupled` says whether weight decay is apart from the gradient, None if any group may say it; `states` are those
    that a fresh one keeps, and whether each has its parameter's shape, None if that is unknown. `entries` are those of
    its state dict if its class makes one of its own. `elsewhere` counts the
    buffers, of all, whose states lie where no save looks. `scaler` scales the loss, `computes_norm` says whether
    gradients can be clipped.
    """

    kind: str
    stage: int
    rank: int
    dp: int
    buffers: tuple[B, ...]
    groups: tuple[Mapping[str, object], ...]
    order: tuple[Mapping[str, Shape], ...]
    name: str
    group_keys: frozenset[str] = frozenset()
    decoupled: bool | None = None
    states: Mapping[str, bool] | None = None
    entries: frozenset[str] = frozenset()
    unsaved_states: tuple[int, int] = (0, 0)
    scaler: object = None
    computes_norm: bool = True

    @property
    def replicated(self) -> bool:
        return self.stage == 0

    def members(self, group: int) -> list[str]:
        """The parameters of a param group, as its buffers have them."""
        return [name for buffer in self.buffers if buffer.group == group for name in buffer.shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun(Generic[B]):
    """One rank of a run: its place among the ranks that share its data, its module, its optimizer and its schedule.

    `features` are names of what only the framework's own load can handle. `shares` are the parts of whole tensors that
    the rank has, of parameters that themselves say so.
    """

    data_rank: int
    data_ranks: int
    module: LiveModule
    optimizer: LiveOptimizer[B] | None
    scheduler: object
    features: tuple[str, ...]
    local_shards: Mapping[str, LocalShard] = field(default_factory=dict)
