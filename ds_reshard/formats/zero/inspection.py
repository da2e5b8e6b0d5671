"""Survey a ZeRO checkpoint for `inspect` and `verify`: open every file, and collect all faults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ds_reshard.containers.plain import Scalars, group_entries, plain, read_scalars, single_elements
from ds_reshard.errors import Fault, ReshardError, collected, damaged
from ds_reshard.formats.zero.checkpoint import MODEL, Grid, TpRank, ZeroCheckpoint, autoep_sizes
from ds_reshard.formats.zero.model_states import ModelStates, read_entries, read_model_states, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, read_optim_states
from ds_reshard.formats.zero.reader import missing_file_faults, read_checkpoint, read_grid
from ds_reshard.formats.zero.shards import ZeroShards, compare_checksums, compare_heads, compare_signatures
from ds_reshard.formats.zero.stage0 import masters, param_groups, states, torch_optimizer
from ds_reshard.formats.zero.universal import CommonState, UniversalStates, list_states, read_state, state_file
from ds_reshard.model.index import Index
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.reports import (
    Arrangement,
    FileEntry,
    GroupEntry,
    Inspection,
    ParameterEntry,
    StateEntry,
    Steps,
    states_of,
)
from ds_reshard.model.rules import active_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The first model file and the first optimizer file that could be read, and all faults, sorted.

    `scalars` holds learning rates and steps of these two files that were saved as tensors. `universal` is what a
    readable universal checkpoint has instead of optimizer files. `splits` says how ranks split each parameter.
    """

    listing: Listing
    model: ModelStates | None
    optim: OptimStates | None
    scalars: Scalars
    faults: tuple[Fault, ...]
    universal: UniversalStates | None = None
    splits: Mapping[str, str] = field(default_factory=dict)

    @property
    def grid(self) -> Grid | None:
        """Return the sizes of the saving run; None without tensor, pipeline and expert parallelism."""
        if self.model is None:
            return None
        try:
            grid = read_grid(self.listing, self.model)
        except ReshardError:
            return None
        experts = self.listing.experts or autoep_sizes(self.model.entries)
        if experts and self.optim is not None:
            grid = grid._replace(ep=max(grid.dp // count for count in self.optim.counts))
        return grid if grid.tp * grid.pp > 1 or self.listing.layers or experts else None

    @property
    def dp(self) -> int | None:
        """Return the data-parallel size of the saving run."""
        if self.model is not None:
            return self.model.dp
        return self.optim.partition_count if self.optim is not None else None


def survey(listing: Listing) -> Survey:
    """Open every shard, metadata only. Never raises for what the files hold.

    A complete checkpoint is opened as a load opens it. Otherwise every file is read by itself, and all are compared;
    without layers and experts, the shards are also opened with the first files that can be read. A layout that is
    refused as a whole is not assembled.
    """
    faults, tp = [*listing.faults, *_empty_file_faults(listing)], TpRank(rules=active_rules())
    is_refused = any(fault.error == "UnsupportedLayout" for fault in faults)
    checkpoint: ZeroCheckpoint | None = None
    if not faults:
        with collected(faults):
            checkpoint = read_checkpoint(listing, tp, faults, optimizer=True)
    heads = _read_heads(listing, faults) if faults else {}
    if faults and not is_refused:
        faults += compare_heads(*_by_kind(heads.values()), listing.folder, states=True)
        if not (listing.layers or listing.experts):
            with collected(faults):
                checkpoint = read_checkpoint(listing, tp, faults, optimizer=True, readable=heads.keys())
    models, optims = _by_kind(
        heads.get(name) for files in (listing.model, listing.optim) for _, name in sorted(files.items())
    )
    model, optim = (checkpoint.model, checkpoint.optim) if checkpoint is not None else (None, None)
    model, optim = model or next(iter(models), None), optim or next(iter(optims), None)
    universal_scalars: Scalars = {}
    if checkpoint is not None:
        _open_shards(checkpoint, heads, faults)
        universal_scalars = _open_tensors(checkpoint, faults)
        listing = checkpoint.listing if checkpoint.universal is not None else listing
    if model is None and optim is not None and not is_refused:
        faults += missing_file_faults(listing, optim.partition_count, optimizer=not listing.universal)
    universal = checkpoint.universal if checkpoint is not None else None
    if listing.universal and model is not None and universal is None and not is_refused:
        _read_tensors(listing, model, faults)
    head_scalars = {**_scalars(model, _stage0_values(model), faults), **_scalars(optim, _group_values(optim), faults)}
    once = {(fault.where, fault.what, fault.found): fault for fault in reversed(faults)}
    return Survey(
        listing=listing,
        model=model,
        optim=optim,
        scalars={**universal_scalars, **head_scalars},
        faults=tuple(once[at] for at in sorted(once)),
        universal=universal,
        splits=_split_texts(checkpoint) if checkpoint is not None else {},
    )


def _split_texts(checkpoint: ZeroCheckpoint) -> dict[str, str]:
    """Return which stages and expert-parallel ranks have a parameter, how ranks split it, and by which evidence."""
    texts_by_name: dict[str, list[str]] = {}
    stages: dict[str, list[int]] = {}
    for number, stage in enumerate(checkpoint.stages):
        for name in stage.trainable:
            stages.setdefault(name, []).append(number)
    for name, numbers in stages.items() if len(checkpoint.stages) > 1 else ():
        where = ", ".join(map(str, numbers))
        texts_by_name[name] = [f"stage {where}" if len(numbers) == 1 else f"a copy in stages {where}"]
    for column in checkpoint.columns:
        ep_rank = column.family.partition(" of experts ")[2]
        for name in (name for buffer in column.buffers for name in buffer.shapes if ep_rank):
            texts_by_name.setdefault(name, []).append(f"expert-parallel rank {ep_rank}")
    for name, split in checkpoint.splits.items():
        texts_by_name.setdefault(name, []).append(str(split))
    return {name: ", ".join(texts) for name, texts in texts_by_name.items()}


def _empty_file_faults(listing: Listing) -> list[Fault]:
    return [
        damaged(listing.path(name), "is empty", "a torch zip file", "0 bytes")
        for name in (*listing.model.values(), *listing.optim.values())
        if listing.nbytes[name] == 0
    ]


def _read_heads(listing: Listing, faults: list[Fault]) -> dict[str, ModelStates | OptimStates | None]:
    """Return the header of each readable file: model and optimizer files of all columns; None for other files."""
    headers: dict[str, ModelStates | OptimStates | None] = {}
    for name in (name for column in listing.columns.values() for files in column for _, name in sorted(files.items())):
        with collected(faults):
            if listing.nbytes[name] and name.endswith("optim_states.pt"):
                headers[name] = listing.read(name, read_optim_states)
            elif listing.nbytes[name]:
                headers[name] = listing.read(name, read_model_states)
    for name in (*listing.layers.values(), *listing.experts.values(), *listing.ep_optim.values()):
        with collected(faults):
            listing.read(name, read_entries)
            headers[name] = None
    return headers


def _by_kind(heads: Iterable[ModelStates | OptimStates | None]) -> tuple[list[ModelStates], list[OptimStates]]:
    headers = list(heads)
    return [header for header in headers if isinstance(header, ModelStates)], [
        header for header in headers if isinstance(header, OptimStates)
    ]


def _open_shards(checkpoint: ZeroCheckpoint, readable: Collection[str], faults: list[Fault]) -> None:
    """Open every shard of the checkpoint, or only `readable` ones, if any; compare what they say and hold."""
    shards, folder = ZeroShards(checkpoint=checkpoint), checkpoint.listing.folder
    model_files = checkpoint.listing.model.items()
    families = {MODEL: {rank: name for rank, name in model_files if rank < checkpoint.dp or checkpoint.tp_models}}
    for column in checkpoint.columns:
        families.setdefault(column.family, {}).update(enumerate(column.files, column.begin))
    for family, files in families.items():
        for rank in sorted(files):
            with collected(faults):
                if files[rank] and (not readable or files[rank] in readable):
                    shards.buffers(family, rank)
    faults += compare_signatures(shards.signatures, folder)
    faults += compare_checksums(shards.checksums, folder)


def _open_tensors(checkpoint: ZeroCheckpoint, faults: list[Fault]) -> Scalars:
    """Open every tensor of a universal checkpoint, add its missing states to `faults`, and return its scalars."""
    universal = checkpoint.universal
    if universal is None:
        return {}
    index = Index(checkpoint.layout, ZeroShards(checkpoint=checkpoint))
    for placement in universal.placements:
        if placement.numel:
            index.open(placement.family, 0)
    faults += [*index.faults, *universal.missing_states]
    values = (value for group in universal.common.groups for value in group.values())
    return _scalars(universal.common, values, faults)


def _read_tensors(listing: Listing, model: ModelStates, faults: list[Fault]) -> None:
    """Read every tensor's file of a universal checkpoint that cannot be opened as a whole."""
    files, folder_faults = list_states(listing.folder, [n for n, shape in model.trainable.items() if prod(shape)])
    faults += folder_faults
    for path, kind in ((state_file(name, kind), kind) for name, kinds in files.items() for kind in kinds):
        with collected(faults):
            read_state(listing.path(path), kind)


def _scalars(
    file: ModelStates | OptimStates | CommonState | None, values: Iterable[object], faults: list[Fault]
) -> Scalars:
    """Return the one-element tensors among `values`, which lie in `file`."""
    if file is not None:
        with collected(faults):
            return read_scalars(file.path, single_elements(values))
    return {}


def _group_values(optim: OptimStates | None) -> Iterator[object]:
    """Yield the hyper-parameters of an optimizer file, which may be one-element tensors."""
    for group in (optim.groups or ()) if optim is not None else ():
        yield from group.values()


def _stage0_values(model: ModelStates | None) -> Iterator[object]:
    saved = torch_optimizer(model)
    for group in param_groups(saved):
        yield from group.values()
    for state in states(saved):
        yield state.get("step")


def describe_survey(result: Survey, *, tag: str) -> Inspection:
    """Return the report of a survey; if no optimizer file could be read, by the model file's configuration."""
    model, optim, grid = result.model, result.optim, result.grid
    saved_config = model.config if model is not None else optim.config if optim is not None else None
    config = saved_config if isinstance(saved_config, dict) else {}
    stage0, optimizer_name = torch_optimizer(model), section(config, "optimizer").get("type")
    return Inspection(
        format="DeepSpeed universal" if result.listing.universal else "DeepSpeed ZeRO",
        folder=result.listing.folder,
        tag=tag,
        version=model.version if model is not None else optim.version if optim is not None else None,
        stage=_stage(result, config),
        wrapper=_wrapper(result),
        dp=result.dp,
        optimizer=optimizer_name if isinstance(optimizer_name, str) else None,  # unless the script passed one
        states=_states_of(result, stage0),
        groups=_groups_of(result, stage0),
        steps=_steps(result, stage0),
        arrangement=_arrangement(result, config),
        parameters=tuple(_parameters(model, _group_by_parameter(result), result.splits)) if model is not None else (),
        files=tuple(_files(result.listing, result.dp)),
        faults=result.faults,
        tp=grid and grid.tp,
        pp=grid and grid.pp,
        ep=grid and grid.ep,
    )


def _stage(result: Survey, config: Mapping[str, object]) -> int | None:
    if result.optim is not None:
        return result.optim.stage
    stage = section(config, "zero_optimization").get("stage")
    if result.universal is not None:
        common = result.universal.common
        return stage if common.by_ds_reshard and isinstance(stage, int) else common.stage
    if result.listing.partitioned_model:
        return 3
    if result.model is None:
        return None
    if result.model.param_shapes is None:
        return 0
    return stage if isinstance(stage, int) and stage in (1, 2) else None


def _wrapper(result: Survey) -> str | None:
    """Return the optimizer's wrapper; None if no file tells."""
    if result.listing.universal:
        return "universal"
    if result.optim is not None:
        return result.optim.kind
    if result.listing.partitioned_model:
        return "zero3"
    return "none" if result.model is not None and result.model.param_shapes is None else None


def _states_of(result: Survey, stage0: Mapping[str, object]) -> tuple[StateEntry, ...]:
    if result.universal is not None:
        kinds = ((placement.key.kind, placement.dtype) for placement in result.universal.placements)
        return states_of(kinds, result.universal.facts.scalars.values())
    if result.optim is not None:
        items = ((("fp32", p.fp32), *p.states.items(), *p.full_states.items()) for p in result.optim.partitions)
        tensors = ((kind, tensor.dtype) for of_partition in items for kind, tensor in of_partition)
        return states_of(tensors, (p.scalars for p in result.optim.partitions))
    numbered = [(str(kind), value) for state in states(stage0) for kind, value in state.items()]
    types = [(kind, value.dtype) for kind, value in numbered if isinstance(value, TensorRecord) and kind != "step"]
    scalars = ({kind: value} for kind, value in numbered if not isinstance(value, TensorRecord) or kind == "step")
    return states_of([*(("fp32", tensor.dtype) for tensor in masters(result.model)), *types], scalars)


def _groups_of(result: Survey, stage0: Mapping[str, object]) -> tuple[GroupEntry, ...]:
    """Return the param groups; members are numbers if no file names them, or if the files contradict each other."""
    shapes, optim = result.model.trainable if result.model is not None else {}, result.optim
    groups: list[tuple[Sequence[str], Mapping[str, object] | None]]
    if result.universal is not None:
        groups = [(group.members, group.hyperparameters) for group in result.universal.facts.groups]
    elif optim is not None:
        buffers = _matching_shapes(result.model, optim)
        shapes = shapes if buffers else {}
        hyper = optim.groups or [None] * len(optim.members)
        names = ([name for i in of for name in buffers[i]] if buffers else [*map(str, of)] for of in optim.members)
        groups = list(zip(names, hyper, strict=True))
    else:
        groups = []
        for group in param_groups(stage0):
            numbers = group.get("params")
            values = {name: value for name, value in group.items() if name != "params"}
            groups.append(([*map(str, numbers)] if isinstance(numbers, list) else [], values))
    return group_entries(groups, shapes, result.scalars)


def _matching_shapes(model: ModelStates | None, optim: OptimStates) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the members of each flat buffer; empty if the files contradict each other, which a fault says."""
    shapes = model.param_shapes if model is not None else None
    return shapes if shapes is not None and len(shapes) == len(optim.partitions) else ()


def _steps(result: Survey, stage0: Mapping[str, object]) -> Steps:
    entries = result.model.entries if result.model is not None else {}
    return Steps(
        global_steps=_count(entries.get("global_steps")),
        global_samples=_count(entries.get("global_samples")),
        skipped_steps=_count(entries.get("skipped_steps")),
        optimizer_steps=tuple(dict.fromkeys(_optimizer_steps(result, stage0))),
    )


def _optimizer_steps(result: Survey, stage0: Mapping[str, object]) -> Iterator[object]:
    """Yield the steps in states, in param groups (DeepSpeed's fused optimizers) and in elastic checkpoints."""
    optim = result.optim
    values: list[object] = [state.get("step") for state in states(stage0)]
    values += [group.get("step") for group in param_groups(stage0)]
    if optim is not None:
        values += [partition.scalars.get("step") for partition in optim.partitions]
        values += [group.get("step") for group in optim.groups or ()]
        values.append(optim.entries.get("base_optimizer_state_step"))
    if result.universal is not None:
        values += [scalars.get("step") for scalars in result.universal.facts.scalars.values()]
        values += [group.get("step") for group in result.universal.common.groups]
    for value in values:
        number = plain(value, result.scalars)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, int | float) and not isinstance(number, bool):
            yield number


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _arrangement(result: Survey, config: Mapping[str, object]) -> Arrangement:
    zero = section(config, "zero_optimization")
    optim = result.optim
    device = section(zero, "offload_optimizer").get("device")
    gaps = [p.alignment is not None and any(p.alignment) for p in optim.partitions] if optim is not None else []
    round_robin = zero.get("round_robin_gradients", False) if config else None
    return Arrangement(
        buffers=len(optim.partitions) if optim is not None else None,
        round_robin=round_robin if isinstance(round_robin, bool) else None,
        alignment_gaps=any(gaps) if optim is not None else None,
        elastic=optim.elastic if optim is not None else None,
        offloaded_to="nvme" if result.listing.nvme else device if isinstance(device, str) else None,
    )


def _parameters(model: ModelStates, group_of: Mapping[str, int], splits: Mapping[str, str]) -> Iterator[ParameterEntry]:
    """Yield every entry of the module, then parameters known only by shape (stage 3, excluded weights)."""
    trainable, frozen = model.trainable, model.frozen_shapes
    first_names: dict[tuple[str, str, int, tuple[int, ...]], str] = {}
    for name in dict.fromkeys((*model.module, *trainable, *frozen)):
        tensor = model.module.get(name)
        tied = model.shared.get(name)
        if tensor is not None and tensor.numel:
            location = (tensor.storage.path, tensor.storage.key, tensor.element_offset, tensor.shape)
            first = first_names.setdefault(location, name)
            tied = tied or (first if first != name else None)
        owner = tied or name
        if name in model.buffer_names:
            role = "buffer"
        elif owner in trainable:
            role = "trainable"
        else:
            # Stage 1 saves no frozen_param_shapes: a tensor that is neither a buffer nor in a param group is frozen.
            is_known = model.param_shapes is not None and (owner in frozen or (tensor is not None and tensor.numel))
            role = "frozen" if is_known else "parameter"
        shape = trainable.get(owner) or frozen.get(owner) or (tensor.shape if tensor is not None else ())
        dtype = tensor.dtype.label if tensor is not None else None
        yield ParameterEntry(
            name=name,
            shape=shape,
            dtype=dtype,
            role=role,
            group=group_of.get(owner),
            tied_to=tied,
            division=splits.get(owner),
        )


def _group_by_parameter(result: Survey) -> dict[str, int]:
    """Return the number of the param group of each trained parameter."""
    if result.universal is not None:
        return {name: g for g, group in enumerate(result.universal.facts.groups) for name in group.members}
    optim = result.optim
    shapes = _matching_shapes(result.model, optim) if optim is not None else ()
    if optim is None or not shapes:
        return {}
    pairs = [(name, g) for g, buffers in enumerate(optim.members) for i in buffers for name in shapes[i]]
    return dict(reversed(pairs))  # if several stages have a parameter, the first stage's group counts


def _files(listing: Listing, dp: int | None) -> Iterator[FileEntry]:
    roles: dict[str, str] = {}
    for column in listing.columns.values():
        for role, files in (("model", column.model), ("optimizer", column.optim)):
            for rank, name in files.items():
                roles[name] = "unused" if dp is not None and rank >= dp else role
    roles |= dict.fromkeys((*listing.layers.values(), *listing.experts.values()), "model")
    roles |= dict.fromkeys((*listing.ep_optim.values(), *(n for n in listing.nbytes if "/" in n)), "optimizer")
    for name in sorted(listing.nbytes):
        yield FileEntry(name=name, nbytes=listing.nbytes[name], role=roles.get(name, "other"))
