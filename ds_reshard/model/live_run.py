"""All that a load needs to know of a run, as plain values: of a live run, or of one that preflight plans.

A host makes a LiveRun from its engine, or computes it from a configuration; the decisions of a load read nothing else
of a framework. The memory of a run has names: "module/NAME" is a tensor of its module, "frozen/NAME" this rank's
partition of a frozen parameter, "fp32/N" and "weight/N" are the masters and weights of flat buffer N, "exp_avg/N" is
a state of that buffer. Tensors are looked up by these names only when bytes move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Part, Shape


class LocalShard(NamedTuple):
    """This rank's shard of a tensor: its shape, and the parts of the tensor in it, or that it is the `whole` tensor."""

    shape: Shape
    parts: tuple[Part, ...]
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A parameter or a buffer of a rank's module, and its shape before data-parallel ranks partition it.

    `names` are the names of a parameter; a buffer has none. `entries` are its names in the module's state dict. `dtype`
    is the type in which this rank keeps it, None for a type without a name. The rank keeps only a partition if the
    tensor is `partitioned`, and its values need a scale if it is `quantized`.
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
"""The value of an entry that is no tensor of its module, and the names of the tensors that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModule:
    """The module of one rank; all names are those of the whole model.

    `names` are all entries of its state dict, `other_shapes` the shapes of entries that are not read as tensors.
    `unloaded` are entries that no module loads, `extra_state_entries` those that modules load by `set_extra_state`.
    `scales` are entries beside an integer weight, which the loading code of its module takes.
    `has_load_hooks` is true if some module takes part in loading; `versioned` maps the modules that load according to
    the saved version to their version.
    """

    tensors: tuple[LiveTensor, ...]
    names: frozenset[str]
    other_shapes: Mapping[str, Shape] = field(default_factory=dict)
    unloaded: Mapping[str, Unloaded] = field(default_factory=dict)
    scales: Mapping[str, Unloaded] = field(default_factory=dict)
    extra_state_entries: tuple[str, ...] = ()
    has_load_hooks: bool = False
    versioned: Mapping[str, int] = field(default_factory=dict)

    def parameters(self) -> dict[str, LiveTensor]:
        """Return the parameters by their first names."""
        return {tensor.names[0]: tensor for tensor in self.tensors if tensor.names}

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the parameters by their first names."""
        return {tensor.names[0]: tensor.shape for tensor in self.tensors if tensor.names}


class Buffer(Protocol):
    """The part of a host's flat buffer that every host has: the parameters in it, and its param group."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def group(self) -> int: ...


B = TypeVar("B", bound=Buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer(Generic[B]):
    """An optimizer, described alike for every wrapper.

    `kind` names the wrapper. This is `rank` of `dp` ranks that share the buffers; at stage 0, rank 0 of 1. `groups` are
    the param groups as in a state dict, `order` has the parameters of each in the order of the script: the trainable
    ones, and of a torch optimizer without a wrapper the frozen ones as well. `parameters` are those of the module in
    its order, and whether each is trained. `name` is the class of the inner optimizer, `group_keys` are the keys of its
    param groups. `decoupled` says whether weight decay is decoupled from the gradient, None if each group decides.
    `states` maps the states that a new optimizer keeps to whether they have their parameter's shape, None if that is
    unknown. `entries` are the keys of its state dict if its class defines one. `unsaved_states` is the number of
    buffers whose states no save contains, and the number of all buffers. `scaler` is the loss scaler, `computes_norm`
    is true if gradients can be clipped. `casts_states` is false if its class loads states by a method of its own, as
    those of bitsandbytes do; torch's casts them to the type of the parameter.
    """

    kind: str
    stage: int
    rank: int
    dp: int
    buffers: tuple[B, ...]
    groups: tuple[Mapping[str, object], ...]
    order: tuple[Mapping[str, Shape], ...]
    parameters: Mapping[str, bool]
    name: str
    group_keys: frozenset[str] = frozenset()
    decoupled: bool | None = None
    states: Mapping[str, bool] | None = None
    entries: frozenset[str] = frozenset()
    unsaved_states: tuple[int, int] = (0, 0)
    scaler: object = None
    computes_norm: bool = True
    casts_states: bool = True

    @property
    def replicated(self) -> bool:
        return self.stage == 0

    @property
    def trained(self) -> set[str]:
        """Return the parameters of all buffers."""
        return {name for buffer in self.buffers for name in buffer.shapes}

    def members(self, group: int) -> list[str]:
        """Return the parameters of a param group in the order of its buffers."""
        return [name for buffer in self.buffers if buffer.group == group for name in buffer.shapes]

    def listed(self, group: int) -> list[str]:
        """Return the parameters of a param group, with frozen ones if the optimizer lists them."""
        return list(self.order[group]) if self.replicated else self.members(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun(Generic[B]):
    """One rank of a run: its data-parallel rank of so many, its module, optimizer and scheduler.

    `features` are the names of features that only the framework's own load supports. `local_shards` are this rank's
    shards of the parameters that know of what tensor they are a shard.
    """

    data_rank: int
    data_ranks: int
    module: LiveModule
    optimizer: LiveOptimizer[B] | None
    scheduler: object
    features: tuple[str, ...]
    local_shards: Mapping[str, LocalShard] = field(default_factory=dict)
