"""One `*optim_states.pt` file: a rank's share of the flat optimizer state, and its other entries.

Layouts from deepspeed 0.19.8: `DeepSpeedZeroOptimizer.state_dict` (runtime/zero/stage_1_and_2.py),
`BF16_Optimizer.state_dict` (runtime/bf16_optimizer.py), `_rigid_state_dict` (runtime/zero/stage3.py). A bf16 stage-1
run may have either of the first two classes under the same file name: the keys tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import fail
from ds_reshard.formats.zero.model_states import positive, section
from ds_reshard.model.facts import Scalar, ScalarTensor, canonical, describe, text_of
from ds_reshard.model.records import ObjectRecord, TensorRecord

STATE = "state "
"""Prefix of a signature's keys for scalar states other than the step, which an optimizer may keep per rank."""
_SAME_ON_ALL_RANKS = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "eps", "momentum"})
"""Floats in a param group that are equal on all ranks. Prodigy's `d_numerator` is not: each rank sums it over its part
of the buffer (`Prodigy.step`, prodigyopt 1.1.2)."""
PARTITION_GROUPS = "ds_zero_partition_groups"
"""At stage 3 with AutoEP: the ranks that share each sub-group (`_zero3_partition_group_metadata`, 0.19.8)."""
_MOMENTUM = "momentum_buffer"
RESERVED = frozenset({"weight", "fp32", "module", "frozen"})
"""Names that no state may have: they are used for weights, masters, and buffers of model files."""
_CONFIG = ("optimizer", "scheduler", "zero_optimization", "bf16", "fp16", "data_types")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One flat buffer's share in a shard: fp32 masters, states of the same shape, and scalar states.

    At stages 1 and 2 there is one per param group, at stage 3 one per sub-group. `unreshardable` describes states that
    are neither flat nor one value: only the saved layout can load them. Of these, `full_states` hold each parameter
    that overlaps the partition whole, as Muon's momentum does.
    """

    fp32: TensorRecord
    states: Mapping[str, TensorRecord]
    scalars: Mapping[str, Scalar]
    unreshardable: Mapping[str, str]
    alignment: tuple[int, ...] | None
    full_states: Mapping[str, TensorRecord] = field(default_factory=dict)

    @property
    def full_param_kinds(self) -> frozenset[str]:
        """Return the states of whole parameters that are read (see `with_full_param_states`)."""
        return frozenset(self.full_states.keys() - self.unreshardable.keys())

    @property
    def padded_numel(self) -> int:
        sizes = [self.fp32.numel, *(state.numel for state in self.states.values())]
        return max(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStates:
    """The header of one optimizer file.

    `kind` is "zero" (stages 1 and 2), "bf16" (BF16_Optimizer), "zero3" or "universal"; `groups` the hyper-parameters
    per param group (None when elastic); `members` the partitions of each param group. `counts` are the numbers of ranks
    that share each flat buffer: fewer than `partition_count` if its parameters are experts.
    """

    path: str
    kind: str
    stage: int
    elastic: bool = False
    partition_count: int = 1
    counts: tuple[int, ...] = ()
    partitions: tuple[Partition, ...] = ()
    groups: tuple[Mapping[str, object], ...] | None
    members: tuple[tuple[int, ...], ...]
    entries: Mapping[str, object]
    version: str
    config: object = None

    def signature(self) -> dict[str, str]:
        """Return the values that every shard of one checkpoint has in common, as text."""
        texts = {
            "ZeRO stage": str(self.stage),
            "optimizer wrapper": self.kind,
            "partition count": str(self.counts),
            "DeepSpeed version": self.version,
            "saved DeepSpeed config": canonical(_comparable_config(self.config)),
            "elastic": str(self.elastic),
        }
        for number, partition in enumerate(self.partitions):
            texts[f"states of partition {number}"] = ",".join(
                sorted(f"{name}:{state.dtype.label}" for name, state in partition.states.items())
            )
            for name, scalar in partition.scalars.items():
                texts[f"{name if name == 'step' else STATE + name} of partition {number}"] = canonical(scalar)
        for number, group in enumerate(self.groups or ()):
            for name, value in group.items():
                may_differ = isinstance(value, float) and name not in _SAME_ON_ALL_RANKS
                texts[f"{STATE if may_differ else ''}{name} of param group {number}"] = canonical(value)
        return texts


def read_optim_states(path: str, stem: str) -> OptimStates:
    """Read one optimizer file: directory, pickle and scalar states. Raises CheckpointDamaged for other layouts."""
    with open_archive(path) as archive:
        check_root(path, stem, archive.root)
        top = archive.load()
        if not isinstance(top, dict) or not isinstance(top.get("optimizer_state_dict"), dict):
            raise fail(path, "is not a DeepSpeed optimizer file", "an entry 'optimizer_state_dict'", keys_of(top))
        entries = top["optimizer_state_dict"]
        if "fp32_flat_groups" in entries or "single_partition_of_fp32_groups" in entries:
            return states_in(path, archive, top, entries)
    raise fail(path, "is of an unknown optimizer layout", "ZeRO 1 to 3 or BF16_Optimizer", keys_of(entries))


def states_in(
    path: str, archive: TorchArchive, top: Mapping[str, object], entries: Mapping[str, object]
) -> OptimStates:
    """Return the header of the optimizer's `entries` in a file with the top level `top`."""
    is_stage3 = "fp32_flat_groups" in entries
    masters = "fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"
    wrapped = "optimizer_state_dict" if is_stage3 else "base_optimizer_state"
    kind = "zero3" if is_stage3 else "zero" if "zero_stage" in entries else "bf16"
    fp32, base = _tensors(path, masters, entries[masters]), entries.get(wrapped)
    saved_count = entries.get("partition_count")
    elastic = isinstance(base, list) and not is_stage3
    states, groups, members = _elastic(path, base, len(fp32)) if elastic else torch_state(path, wrapped, base)
    if sorted(number for of_group in members for number in of_group) != list(range(len(fp32))):
        raise fail(path, "param groups and flat buffers differ", f"{len(fp32)} buffers", str(members))
    if is_stage3:
        count = positive(path, "partition_count", saved_count)
        counts = _sub_group_counts(path, entries.get(PARTITION_GROUPS), count, len(fp32))
    else:
        saved_counts = saved_count if isinstance(saved_count, list) else [saved_count] * len(fp32)
        counts = tuple(positive(path, "partition_count", number) for number in saved_counts)
        count = max(counts, default=1)
        if len(counts) != len(fp32):
            raise fail(path, "entry 'partition_count' is malformed", f"{len(fp32)} numbers", f"{len(counts)}")
    paddings = [0] * len(fp32) if is_stage3 else _ints(path, "group_paddings", entries.get("group_paddings"), len(fp32))
    partitions = []
    for number, tensor in enumerate(fp32):
        padded = tensor.numel + paddings[number] if kind == "zero" else tensor.numel
        alignment = None if is_stage3 else _alignment(path, entries.get("param_alignment_paddings"), number)
        partitions.append(_partition(path, archive, number, tensor, states.get(number, {}), padded, alignment))
    partitions = _with_optimizer_values(partitions, base)
    config = top.get("ds_config")
    if kind == "zero":
        partitions = _separate_muon_momentum(partitions, states, groups, members, counts, config)
    return OptimStates(
        path=path,
        kind=kind,
        stage={"zero3": 3, "bf16": 1}.get(kind) or read_stage(path, entries["zero_stage"]),
        elastic=elastic,
        partition_count=count,
        counts=counts,
        partitions=tuple(partitions),
        groups=groups,
        members=members,
        entries=entries,
        version=text_of(entries.get("ds_version", top.get("ds_version", "unknown"))),
        config=config,
    )


def _sub_group_counts(path: str, value: object, count: int, number: int) -> tuple[int, ...]:
    """Return the number of ranks that share each sub-group: fewer than all if its parameters are experts."""
    if value is None:
        return (count,) * number
    if not isinstance(value, list) or len(value) != number or not all(isinstance(entry, dict) for entry in value):
        raise fail(path, f"entry {PARTITION_GROUPS!r} is malformed", f"{number} sub-groups", keys_of(value))
    return tuple(positive(path, PARTITION_GROUPS, entry.get("partition_count")) for entry in value)


States = dict[int, Mapping[str, object]]
Groups = tuple[Mapping[str, object], ...]
Members = tuple[tuple[int, ...], ...]


def torch_state(path: str, entry: str, value: object) -> tuple[States, Groups, Members]:
    """Return a torch optimizer's states by index, its groups, and the indices of each group."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        raise fail(
            path, f"entry {entry!r} is not a torch optimizer state", "'state' and 'param_groups'", keys_of(value)
        )
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise fail(path, f"entry {entry!r} has malformed param groups", "a list of dicts with 'params'", "other")
    states: States = {}
    for index, state in value["state"].items():
        if isinstance(index, str):
            continue  # listed by `optimizer_values`
        if not isinstance(index, int) or not isinstance(state, dict):
            raise fail(path, f"entry {entry!r} has malformed states", "dicts by index", f"{index!r}")
        states[index] = state
    members = tuple(tuple(_index(path, i) for i in g["params"]) for g in groups)
    values = tuple({str(k): v for k, v in g.items() if k != "params"} for g in groups)
    return states, values, members


def optimizer_values(value: object) -> dict[str, str]:
    """Return what a torch optimizer keeps besides its parameters' states and groups, by name, with a description.

    MADGRAD counts its steps in `state["k"]` (madgrad/madgrad.py, 1.3); others add an entry to their `state_dict`.
    """
    saved = value if isinstance(value, dict) else {}
    state = saved.get("state")
    names = [str(key) for key in saved if key not in ("state", "param_groups")]
    names += [key for key in state if isinstance(key, str)] if isinstance(state, dict) else []
    return dict.fromkeys(names, "a value of the optimizer itself")


def _with_optimizer_values(partitions: Sequence[Partition], value: object) -> list[Partition]:
    """Return the partitions; the first one also lists the optimizer's own values as unreshardable."""
    values = optimizer_values(value)
    return [
        replace(partition, unreshardable={**partition.unreshardable, **values}) if values and not number else partition
        for number, partition in enumerate(partitions)
    ]


def _elastic(path: str, value: object, count: int) -> tuple[States, None, Members]:
    """Return the states of `elastic_checkpoint=true`: a list of unpadded states, one per group, without groups."""
    if not isinstance(value, list) or len(value) != count or not all(isinstance(s, dict) for s in value):
        raise fail(path, "entry 'base_optimizer_state' is malformed", f"{count} states", keys_of(value))
    return dict(enumerate(value)), None, tuple((g,) for g in range(count))


def _partition(
    path: str,
    archive: TorchArchive,
    number: int,
    fp32: TensorRecord,
    state: Mapping[str, object],
    padded: int,
    alignment: tuple[int, ...] | None,
) -> Partition:
    """Sort the states into those shaped like the partition (flat, of its size), scalars, and all others."""
    flat: dict[str, TensorRecord] = {}
    scalars: dict[str, Scalar] = {}
    others: dict[str, str] = {}
    for name, value in state.items():
        if str(name) in RESERVED or "/" in str(name):
            others[str(name)] = "a name that is used for something else"
        elif isinstance(value, TensorRecord) and len(value.shape) == 1 and value.numel in (fp32.numel, padded):
            if not value.contiguous:
                raise fail(
                    path, f"state {name!r} of partition {number} is not contiguous", "stride 1", str(value.stride)
                )
            flat[str(name)] = value
        elif isinstance(value, TensorRecord) and value.numel == 1 and value.contiguous:
            data = archive.tensor_bytes(value)
            scalars[str(name)] = ScalarTensor(dtype=value.dtype, shape=value.shape, data=data)
        elif value is None or isinstance(value, int | float | bool | str):
            scalars[str(name)] = value
        else:
            others[str(name)] = f"shape {value.shape}" if isinstance(value, TensorRecord) else type(value).__name__
    if len(fp32.shape) != 1 or not fp32.contiguous:
        raise fail(path, f"fp32 partition {number} is not flat", "one contiguous dimension", str(fp32.shape))
    return Partition(fp32=fp32, states=flat, scalars=scalars, unreshardable=others, alignment=alignment)


def _separate_muon_momentum(
    partitions: Sequence[Partition],
    states: States,
    groups: Groups | None,
    members: Members,
    counts: Sequence[int],
    config: object,
) -> list[Partition]:
    """Move Muon's momentum out of the flat states: it has whole parameters, and the partition's size only by chance.

    A rank keeps all of each parameter that overlaps its partition (`_muon_momentum_buffer`, stage_1_and_2.py, 0.19.8);
    in CPU memory only its part (`_apply_muon_updates_cpu_offload`), which is not read. An elastic file has no groups.
    """
    saved_config = config if isinstance(config, dict) else {}
    in_gpu_memory = bool(saved_config) and section(saved_config, "zero_optimization").get("offload_optimizer") is None
    elastic = groups is None and str(section(saved_config, "optimizer").get("type")).lower() == "muon"
    readable = in_gpu_memory and not elastic
    result = list(partitions)
    for group, numbers in zip(groups or [{"use_muon": elastic}] * len(members), members, strict=True):
        for number in numbers if group.get("use_muon") else ():
            value = states.get(number, {}).get(_MOMENTUM)
            partition = result[number]
            if value is None or (counts[number] == 1 and not any(partition.alignment or ())):
                continue
            flat = isinstance(value, TensorRecord) and len(value.shape) == 1 and value.contiguous
            result[number] = replace(
                partition,
                states={name: state for name, state in partition.states.items() if name != _MOMENTUM},
                scalars={name: state for name, state in partition.scalars.items() if name != _MOMENTUM},
                unreshardable={**partition.unreshardable, _MOMENTUM: "Muon's, of whole parameters"},
                full_states={_MOMENTUM: value} if isinstance(value, TensorRecord) and flat and readable else {},
            )
    return result


def with_full_param_states(optim: OptimStates) -> OptimStates:
    """Return the same file for a reader that also takes the states of whole parameters."""
    return replace(
        optim,
        partitions=tuple(
            replace(p, unreshardable={name: why for name, why in p.unreshardable.items() if name not in p.full_states})
            for p in optim.partitions
        ),
    )


def _comparable_config(config: object) -> object:
    """Return the sections of a saved config that are equal on all ranks of a run; others may name the rank."""
    return {key: config[key] for key in _CONFIG if key in config} if isinstance(config, dict) else None


def _tensors(path: str, entry: str, value: object) -> list[TensorRecord]:
    if isinstance(value, list | tuple) and value and all(isinstance(item, TensorRecord) for item in value):
        return list(value)
    raise fail(path, f"entry {entry!r} is malformed", "a list of tensors", keys_of(value))


def _ints(path: str, entry: str, value: object, count: int) -> list[int]:
    if isinstance(value, list) and len(value) == count and all(isinstance(i, int) and i >= 0 for i in value):
        return value
    raise fail(path, f"entry {entry!r} is malformed", f"{count} sizes", describe(value))


def _alignment(path: str, value: object, group: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and group < len(value) and isinstance(value[group], list):
        return tuple(_ints(path, "param_alignment_paddings", value[group], len(value[group])))
    raise fail(path, "entry 'param_alignment_paddings' is malformed", "a list per group", keys_of(value))


_STAGES: Mapping[object, int] = {"optimizer_states": 1, "gradients": 2, "weights": 3}
"""`ZeroStageEnum` of DeepSpeed 0.19.8 (runtime/zero/config.py) by its members' names."""


def read_stage(path: str, value: object) -> int:
    """Return the ZeRO stage from a number, `ZeroStageEnum(number)`, or its name (Python 3.11.0 to 3.11.3)."""
    if isinstance(value, ObjectRecord):
        by_name = len(value.args) == 2 and str(value.args[0]).endswith(".ZeroStageEnum")
        value = _STAGES.get(value.args[1]) if by_name else value.args[0] if len(value.args) == 1 else value
    if isinstance(value, int) and value in (1, 2, 3):
        return value
    raise fail(path, "entry 'zero_stage' is malformed", "1, 2 or 3", describe(value))


def _index(path: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise fail(path, "a param group lists a member that is not an index", "ints", describe(value))


def keys_of(value: object) -> str:
    return f"keys {sorted(map(str, value))[:8]}" if isinstance(value, dict) else type(value).__name__
