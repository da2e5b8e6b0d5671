"""Survey a ZeRO checkpoint for `inspect` and `verify`: open every file, and collect all faults."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ds_reshard.containers.plain import Scalars, group_entries, plain, read_scalars, single_elements
from ds_reshard.errors import Fault, ReshardError, collected, damaged
from ds_reshard.formats.zero.checkpoint import MODEL, Grid, TpRank, ZeroCheckpoint, autoep_sizes
from ds_reshard.formats.zero.content import first_names
from ds_reshard.formats.zero.model_states import ModelStates, read_entries, read_model_states, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, read_optim_states
from ds_reshard.formats.zero.reader import missing_file_faults, read_checkpoint, read_grid
from ds_reshard.formats.zero.shards import ZeroShards, compare_checksums, compare_heads, compare_signatures
from ds_reshard.formats.zero.stage0 import masters, param_groups, torch_optimizer
from ds_reshard.formats.zero.stage0 import states as stage0_states
from ds_reshard.formats.zero.universal import UniversalStates, list_states, read_state, state_file
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.reports import Arrangement, FileEntry, Inspection, ParameterEntry, Steps, states_of
from ds_reshard.model.rules import active_rules


class _Optimizer(NamedTuple):
    """What files of any kind tell of an optimizer: its param groups and the types of its states.

    `scalars` has the states that are single values, by parameter or flat buffer. A group comes with its members:
    numbers, if no file names them or the files contradict each other; then `named` is False.
    """

    groups: Sequence[tuple[Sequence[str], Mapping[str, object] | None]]
    states: Sequence[tuple[str, ElementType]]
    scalars: Sequence[Mapping[str, object]]
    named: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The first model file and the first optimizer file that could be read, and all faults, sorted.

    `scalars` holds learning rates and steps of these two files that were saved as tensors. `splits` says how ranks
    split each parameter.
    """

    listing: Listing
    model: ModelStates | None
    optim: OptimStates | None
    optimizer: _Optimizer
    scalars: Scalars
    faults: tuple[Fault, ...]
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
            grid = grid._replace(ep=max((grid.dp // count for count in self.optim.counts), default=1))
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
    models, optims = _by_kind(
        heads.get(name) for files in (listing.model, listing.optim) for _, name in sorted(files.items())
    )
    if faults and not is_refused:
        faults += compare_heads(*_by_kind(heads.values()), listing.folder, states=True)
        if not (listing.layers or listing.experts or any(autoep_sizes(model.entries) for model in models)):
            with collected(faults):
                checkpoint = read_checkpoint(listing, tp, faults, optimizer=True, readable=heads.keys())
    model, optim = (checkpoint.model, checkpoint.optim) if checkpoint is not None else (None, None)
    model, optim = model or next(iter(models), None), optim or next(iter(optims), None)
    universal = checkpoint.universal if checkpoint is not None else None
    if checkpoint is not None:
        _open_shards(
            checkpoint, {*heads, *(universal.nbytes if universal is not None else ())} if heads else (), faults
        )
    if universal is not None and checkpoint is not None:
        faults += universal.missing_states
        listing = checkpoint.listing
    if model is None and optim is not None and not is_refused:
        faults += missing_file_faults(listing, optim.partition_count, optimizer=not listing.universal)
    if listing.universal and model is not None and universal is None and not is_refused:
        _read_tensors(listing, model, faults)
    optimizer, first, scalars = _optimizer(checkpoint, model, optim), optim or model, dict[TensorRecord, ScalarTensor]()
    values = [*(value for _, of_group in optimizer.groups for value in (of_group or {}).values())]
    with collected(faults):
        tensors = single_elements([*values, *(of.get("step") for of in optimizer.scalars)])
        scalars = read_scalars(first.path, tensors) if first is not None else {}
    once = {(fault.where, fault.what, fault.found): fault for fault in reversed(faults)}
    return Survey(
        listing=listing,
        model=model,
        optim=optim,
        optimizer=optimizer,
        scalars=scalars,
        faults=tuple(once[at] for at in sorted(once)),
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
    """Open every shard of the checkpoint, or only `readable` ones, if any; compare what they say and hold.

    Each tensor of a universal checkpoint is a shard.
    """
    shards, folder = ZeroShards(checkpoint=checkpoint), checkpoint.listing.folder
    model_files = checkpoint.listing.model.items()
    families = {MODEL: {rank: name for rank, name in model_files if rank < checkpoint.dp or checkpoint.tp_models}}
    for column in checkpoint.columns:
        families.setdefault(column.family, {}).update(enumerate(column.files, column.begin))
    if checkpoint.universal is not None:
        placements = (one for one in checkpoint.layout.placements.values() if one.numel and one.family != MODEL)
        families |= {placement.family: {0: placement.family} for placement in placements}
    for family, files in families.items():
        for rank in sorted(files):
            with collected(faults):
                if files[rank] and (not readable or files[rank] in readable):
                    shards.buffers(family, rank)
    faults += compare_signatures(shards.signatures, folder)
    faults += compare_checksums(shards.checksums, folder)


def _read_tensors(listing: Listing, model: ModelStates, faults: list[Fault]) -> None:
    """Read every tensor's file of a universal checkpoint that cannot be opened as a whole."""
    files, folder_faults = list_states(listing.folder, [n for n, shape in model.trainable.items() if prod(shape)])
    faults += folder_faults
    for path, kind in ((state_file(name, kind), kind) for name, kinds in files.items() for kind in kinds):
        with collected(faults):
            read_state(listing.path(path), kind)


def _optimizer(checkpoint: ZeroCheckpoint | None, model: ModelStates | None, optim: OptimStates | None) -> _Optimizer:
    if checkpoint is not None and checkpoint.universal is not None and checkpoint.facts is not None:
        groups, scalars = checkpoint.facts.groups, list(checkpoint.facts.scalars.values())
        tensors = [(key.kind, placement.dtype) for key, placement in checkpoint.layout.placements.items()]
        states = [(kind, dtype) for kind, dtype in tensors if kind != WEIGHT]
        return _Optimizer([(group.members, group.hyperparameters) for group in groups], states, scalars)
    if optim is not None:
        shapes = model.param_shapes if model is not None else None
        named = shapes is not None and len(shapes) == len(optim.partitions)
        names = (
            [[*of] for of in shapes] if shapes is not None and named else [[str(n)] for n in range(len(optim.counts))]
        )
        members = ([name for number in of for name in names[number]] for of in optim.members)
        groups_of_file = list(zip(members, optim.groups or [None] * len(optim.members), strict=True))
        items = ((("fp32", p.fp32), *p.states.items(), *p.full_states.items()) for p in optim.partitions)
        states = [(kind, tensor.dtype) for of_partition in items for kind, tensor in of_partition]
        return _Optimizer(groups_of_file, states, [p.scalars for p in optim.partitions], named)
    saved = torch_optimizer(model)
    values = [(str(kind), value) for state in stage0_states(saved) for kind, value in state.items()]
    states = [(kind, value.dtype) for kind, value in values if isinstance(value, TensorRecord) and kind != "step"]
    numbered = [
        {str(kind): value for kind, value in state.items() if kind == "step" or not isinstance(value, TensorRecord)}
        for state in stage0_states(saved)
    ]
    numbers = [group.get("params") for group in param_groups(saved)]
    lists = [[*map(str, of)] if isinstance(of, list) else [] for of in numbers]
    hyper = [{name: value for name, value in group.items() if name != "params"} for group in param_groups(saved)]
    tensors = [*(("fp32", tensor.dtype) for tensor in masters(model)), *states]
    return _Optimizer(list(zip(lists, hyper, strict=True)), tensors, numbered, named=False)


def describe_survey(result: Survey, *, tag: str) -> Inspection:
    """Return the report of a survey; if no optimizer file could be read, by the model file's configuration."""
    model, optim, grid = result.model, result.optim, result.grid
    saved_config = model.config if model is not None else optim.config if optim is not None else None
    config = saved_config if isinstance(saved_config, dict) else {}
    optimizer, optimizer_name = result.optimizer, section(config, "optimizer").get("type")
    members = [
        (name, number) for number, (names, _) in enumerate(optimizer.groups) for name in names if optimizer.named
    ]
    group_of = dict(reversed(members))  # if several stages have a parameter, the first stage's group counts
    return Inspection(
        format="DeepSpeed universal" if result.listing.universal else "DeepSpeed ZeRO",
        folder=result.listing.folder,
        tag=tag,
        version=model.version if model is not None else optim.version if optim is not None else None,
        stage=_stage(result, config),
        wrapper=_wrapper(result),
        dp=result.dp,
        optimizer=optimizer_name if isinstance(optimizer_name, str) else None,  # unless the script passed one
        states=states_of(optimizer.states, optimizer.scalars),
        groups=group_entries(optimizer.groups, model.trainable if model and optimizer.named else {}, result.scalars),
        steps=_steps(result),
        arrangement=_arrangement(result, config),
        parameters=tuple(_parameters(model, group_of, result.splits)) if model is not None else (),
        files=tuple(_files(result.listing, result.dp)),
        faults=result.faults,
        tp=grid and grid.tp,
        pp=grid and grid.pp,
        ep=grid and grid.ep,
    )


def _stage(result: Survey, config: Mapping[str, object]) -> int | None:
    stage, model = section(config, "zero_optimization").get("stage"), result.model
    if result.optim is not None:
        by_config = isinstance(result.optim, UniversalStates) and result.optim.by_ds_reshard and isinstance(stage, int)
        return stage if by_config and isinstance(stage, int) else result.optim.stage
    if result.listing.partitioned_model or model is None or model.param_shapes is None:
        return 3 if result.listing.partitioned_model else None if model is None else 0
    return stage if isinstance(stage, int) and stage in (1, 2) else None


def _wrapper(result: Survey) -> str | None:
    """Return the optimizer's wrapper; None if no file tells."""
    if result.listing.universal or result.optim is not None:
        return "universal" if result.optim is None else result.optim.kind
    if result.listing.partitioned_model:
        return "zero3"
    return "none" if result.model is not None and result.model.param_shapes is None else None


def _steps(result: Survey) -> Steps:
    """Return the counters, and the steps of states, param groups (DeepSpeed's fused optimizers) and elastic files."""
    entries, optimizer = result.model.entries if result.model is not None else {}, result.optimizer
    values = [of.get("step") for of in (*optimizer.scalars, *(group or {} for _, group in optimizer.groups))]
    values += [result.optim.entries.get("base_optimizer_state_step")] if result.optim is not None else []
    numbers = [plain(value, result.scalars) for value in values]
    numbers = [int(number) if isinstance(number, float) and number.is_integer() else number for number in numbers]
    steps = (number for number in numbers if isinstance(number, int | float) and not isinstance(number, bool))
    return Steps(
        global_steps=_count(entries.get("global_steps")),
        global_samples=_count(entries.get("global_samples")),
        skipped_steps=_count(entries.get("skipped_steps")),
        optimizer_steps=tuple(dict.fromkeys(steps)),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _arrangement(result: Survey, config: Mapping[str, object]) -> Arrangement:
    zero = section(config, "zero_optimization")
    optim = result.optim if not result.listing.universal else None
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
    first = first_names(model)
    for name in dict.fromkeys((*model.module, *trainable, *frozen)):
        tensor = model.module.get(name)
        owner = model.shared.get(name, first.get(name, name))
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
            tied_to=owner if owner != name else None,
            division=splits.get(owner),
        )


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
