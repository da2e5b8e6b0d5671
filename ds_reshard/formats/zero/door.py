"""DeepSpeed's ZeRO and universal checkpoints as a format: what it opens, describes and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointDamaged, ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import MODEL, ZeroCheckpoint
from ds_reshard.formats.zero.content import (
    LAYOUT_ENTRIES,
    content_of,
    optimizer_faults,
    quantized_faults,
    unnamed_optimizer_fault,
)
from ds_reshard.formats.zero.grid_target import FORMATS, zero_target
from ds_reshard.formats.zero.groups import ep_of, groups_for_ep, merge_expert_groups, merge_stage_groups
from ds_reshard.formats.zero.inspection import Survey, describe_survey, survey
from ds_reshard.formats.zero.model_states import LAGGING, QUANTIZED
from ds_reshard.formats.zero.modules import expert_of, ties_first, with_placeholders
from ds_reshard.formats.zero.names import Listing, read_listing
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.formats.zero.shards import ZeroShards, compare_checksums, compare_signatures, replica_fault
from ds_reshard.formats.zero.stage0 import masters as saved_masters
from ds_reshard.formats.zero.stage0 import states, torch_optimizer
from ds_reshard.formats.zero.target import DATA_FIRST, Saving
from ds_reshard.formats.zero.tensor_parallel import note_on_unnamed
from ds_reshard.formats.zero.universal_target import universal_target
from ds_reshard.model.checkpoint import Checkpoint, Format, Shards, SurveyReport
from ds_reshard.model.checkpoint import Listing as AnyListing
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content
from ds_reshard.model.facts import GroupFacts, canonical, describe
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Holder, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box
from ds_reshard.model.reports import Inspection
from ds_reshard.model.target import ConversionRequest, Target

UNIVERSAL = "universal"
_MAY_BE_NONE = ("lr_scheduler", "data_sampler", "random_ltd", "ds_autoep_layers")
"""Entries that DeepSpeed sets to None, or leaves out, if the run has no such part."""
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")


class OpenedZero(Checkpoint):
    framework = "DeepSpeed"

    def __init__(self, listing: Listing, *, optimizer: bool = True) -> None:
        self.weights_alone = not optimizer
        zero = open_checkpoint(listing, optimizer=optimizer)
        if zero.later_stage_weights and not optimizer and any(column.optim for column in listing.columns.values()):
            zero = open_checkpoint(listing, optimizer=True)  # only its masters have the first stage's values of these
        self.zero = zero = with_placeholders(merge_expert_groups(merge_stage_groups(zero)))
        raise_faults(_unnamed_optimizer_faults(zero), subject=f"checkpoint {listing.folder}")
        # Files of layers and experts hold no step, and no file says which experts a rank's states belong to.
        merged_universal = zero.universal is not None and zero.tp_models
        self.masters_are_cast = bool(listing.layers or listing.experts or merged_universal)
        self.mismatch_mend = "restore all files of one save, or load another tag"
        self.folder, self.facts, self.ranks = listing.folder, zero.facts, zero.dp
        self.tp, self.pp, self.ep = zero.grid.tp, zero.grid.pp, zero.grid.ep
        self.layout = zero.layout
        self.shared, self.buffer_names = zero.model.shared, zero.model.buffer_names
        self.notes, self.module = tuple(_notes(zero)), zero.model.module
        opened_listing = zero.listing
        self.shard_names = list(_shard_names(zero))
        names = (*self.shard_names, *(zero.universal.nbytes if zero.universal is not None else ()))
        self.files = {name: opened_listing.nbytes[name] for name in names}
        self.scaling = (
            {key: value for key, value in zero.optim.entries.items() if key in _SCALING}
            if zero.optim and zero.universal is None
            else {}
        )
        if zero.facts is None:
            self.optimizer = "names none (ZeRO stage 0): not compared"
            self.unnamed_optimizer = zero.model.entries.get("optimizer")
        else:
            self.optimizer = "names its parameters"

    def shards(self) -> Shards:
        """Return an index of the saved ranks' files that compares what it opens."""
        pieces = ZeroShards(checkpoint=self.zero)
        index = Index(self.layout, pieces)

        def compare() -> list[Fault]:
            for column in self.zero.columns if self.compare_scalar_states else ():
                index.open(column.family, 0)  # whose values stand for all
            mixed = compare_signatures(pieces.signatures, self.folder, states=self.compare_scalar_states)
            return [*mixed, *compare_checksums(pieces.checksums, self.folder)]

        return Shards(index=index, compare=compare)

    def replica_fault(
        self, key: TensorKey, holder: Holder, found: str, untrained: Callable[[TensorKey], bool]
    ) -> Fault | None:
        """Return the fault of a replica that differs. Untied copies on other stages may, unless they were trained."""
        if not holder.stage:
            return replica_fault(self.zero, key, holder.rank, found)
        master = self.layout.placements.get(TensorKey(key.name, MASTER))
        if master is not None and not any(replica.holder.stage for replica in master.replicas):  # one stage has it
            what, mend = "differs between the files of its tied module", "restore all files of one save"
            return CheckpointDamaged.fault(f"parameter {key}", what, "the same bytes", found, mend=mend)
        states = [key._replace(kind=kind) for kind in self.layout.kinds(key.name) if kind not in (MASTER, WEIGHT)]
        if (
            master is None
            or holder not in {replica.holder for replica in master.replicas}
            or (states and all(map(untrained, states)))
        ):
            return None
        what = f"has a copy on another stage (copy {holder.stage + 1}) that was trained and differs from the first"
        mend = "if it is tied, restore all files of one save; else load it in a run with as many stages that have it"
        return CheckpointDamaged.fault(f"parameter {key}", what, "the same bytes", found, mend=mend)

    def independent_parts(self) -> Iterator[Mapping[str, Sequence[TensorKey]]]:
        """Yield the experts of each layer of `deepspeed.moe`, with their tensors."""
        layers: dict[str, dict[str, dict[str, list[TensorKey]]]] = {}
        for key in self.layout.placements:
            parts = expert_of(key.name)
            if parts is not None:
                expert = layers.setdefault(parts[0], {}).setdefault(f"{parts[0]}{parts[1]}", {})
                expert.setdefault(parts[2], []).append(key)
        for experts in layers.values():
            yield {
                name: [key for _, keys in sorted(of.items()) for key in sorted(keys)] for name, of in experts.items()
            }

    def shards_of(self, name: str) -> Sequence[tuple[tuple[int, ...], Sequence[tuple[Box, int]]]]:
        split = self.zero.splits.get(name)
        if split is None or split.replicated:
            return ()
        return list(zip(split.shards, split.parts_by_rank, strict=True))

    def content(self) -> Content:
        content = content_of(self.zero, weights_alone=self.weights_alone)
        return replace(content, notes=(*self.notes, *content.notes)) if self.zero.has_grid_files else content

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        experts = any(expert_of(name) is not None for name in self.zero.model.trainable)
        if self.zero.has_grid_files or experts or asked.names is not None:
            return None  # the files of a plain module cannot be rewritten from a grid's, or under other names
        if asked.to not in WRITES:
            return None
        content = content_of(self.zero, same_format=True)
        faults = [*content.faults, *quantized_faults(self.zero.model)]
        raise_faults(faults, subject=f"converting {self.folder} to {asked.to}")
        assert isinstance(self.index.source, ZeroShards)
        return _target(Saving(content=content, source_shards=self.index.source), asked, like)

    def open_all(self) -> None:
        for rank in self.zero.listing.model:
            self.open_for(MODEL, rank)
        super().open_all()

    def open_first(self) -> None:
        for column in self.zero.columns:
            self.index.open(column.family, 0)
        self.open_for(MODEL, 0)

    def open_for(self, family: str, shard: int) -> None:
        """Open the model file of a saved rank: stage 3 has one per rank, often without any tensor."""
        if family == MODEL and self.zero.listing.partitioned_model and shard < self.zero.dp:
            self.index.open(MODEL, shard)

    def non_contiguous_weights(self) -> dict[str, TensorRecord]:
        return {name: t for name, t in self.zero.model.module.items() if t.numel and not t.contiguous}

    def unnamed_tensors(self) -> Iterator[tuple[TensorKey, TensorRecord]]:
        """Yield the tensors of a stage-0 optimizer, which names no parameter; its states are numbered."""
        if self.zero.stage:
            return
        for number, tensor in enumerate(saved_masters(self.zero.model)):
            yield TensorKey(name=f"master {number}", kind="fp32"), tensor
        for number, state in enumerate(states(torch_optimizer(self.zero.model))):
            for kind, value in state.items():
                if isinstance(value, TensorRecord):
                    yield TensorKey(name=f"optimizer state {number}", kind=str(kind)), value

    def stored_as_master_only(self, key: TensorKey) -> bool:
        if key.kind != WEIGHT or not (self.zero.listing.partitioned_model or self.zero.stages):
            return False
        return self.shared.get(key.name, key.name) in self.zero.model.trainable

    def weight_faults(self, key: TensorKey) -> Iterator[Fault]:
        if key.name in self.zero.model.quantized:
            yield UnsupportedLayout.fault(key.name, QUANTIZED, mend="save with exclude_frozen_parameters=True")
        if self.zero.model.masters_lag and key.kind != WEIGHT:
            yield UnsupportedLayout.fault(str(key), LAGGING, mend="ask for weights alone, in the type that was saved")

    def values(self) -> Mapping[str, Mapping[str, object]]:
        saved = self.zero.model.entries
        entries = {key: value for key, value in saved.items() if key not in LAYOUT_ENTRIES}
        entries = {key: value for key, value in entries.items() if value is not None or key not in _MAY_BE_NONE}
        return {"": entries, "module": self.zero.model.objects}

    def groups(self) -> tuple[GroupFacts, ...]:
        """Return the param groups without the names of expert groups, which contain the expert-parallel size."""
        result = []
        for group in super().groups():
            values = dict(group.hyperparameters or {})
            name = values.pop("name", None) if values.get("moe") is True else None
            result.append(replace(group, hyperparameters=values) if name is not None else group)
        return tuple(result)

    def uncompared_notes(self, name: str) -> Iterator[str]:
        zero = self.zero
        weights = [TensorKey(name=parameter, kind="weight") for parameter in zero.model.trainable]
        unstored = sum(self.stored_as_master_only(key) and key not in self.layout for key in weights)
        if unstored:
            yield (
                f"the weights of {unstored} parameters are not stored in {name} (ZeRO 3): only their "
                "fp32 masters are compared"
            )
        if zero.listing.partitioned_model and zero.model.buffer_names and zero.dp > 1:
            yield f"each rank of ZeRO 3 saves its buffers: those of the first rank of {name} are compared"
        if zero.facts is None and zero.stage == 0:
            yield (
                f"the optimizer in {name} (ZeRO 0) names no parameter: its states are compared by checksum, "
                "and only with another stage-0 checkpoint"
            )
        for number, partition in enumerate(zero.optim.partitions if zero.optim is not None else ()):
            for kind, why in partition.unreshardable.items():
                yield f"state {kind!r} of flat buffer {number} in {name} is not compared: {why}"


def _unnamed_optimizer_faults(zero: ZeroCheckpoint) -> Iterator[Fault]:
    """Refuse stage-0 optimizers of several ranks, which name no parameter: only the run's own order does."""
    of_tp_ranks, of_ep_ranks = bool(zero.tp_models) and zero.stage == 0, bool(zero.listing.ep_optim)
    for axis, size in [("tensor", zero.grid.tp)] * of_tp_ranks + [("expert", zero.grid.ep)] * of_ep_ranks:
        what = f"holds optimizers that name no parameter (ZeRO stage 0), one for each {axis}-parallel rank"
        expected = "ZeRO stage 1 to 3" if axis == "tensor" else "ZeRO stage 1 or 2"
        mend = f"load it in a run with import ds_reshard.auto, or with {axis}-parallel size {size}"
        yield UnsupportedLayout.fault(zero.listing.folder, what, expected, "stage 0", mend=mend)


def _shard_names(zero: ZeroCheckpoint) -> Iterator[str]:
    """Yield the names of all files that the ranks of the saving run wrote."""
    if not zero.stages:
        yield from (files[rank] for files in (zero.listing.model, zero.listing.optim) for rank in sorted(files))
        yield from (name for _, name in sorted(zero.listing.experts.items()))
        return
    yield from (column.model[0] for _, column in sorted(zero.listing.columns.items()))
    yield from (name for _, name in sorted(zero.listing.layers.items()))
    yield from (name for column in zero.columns for name in column.files)


def _unsupported_expert_faults(content: Content, to: str) -> Iterator[Fault]:
    """Refuse AutoEP's experts, and native ones at ZeRO stage 3 (`_configure_distributed_model`, engine.py, 0.19.8)."""
    experts = [name for name in content.trained if expert_of(name) is not None]
    if experts and to == "zero3":
        what, mend = "is an expert of deepspeed.moe, which does not know ZeRO stage 3", "--to zero1, zero2 or bf16"
        yield UnsupportedLayout.fault(experts[0], what, mend=mend)
    if isinstance(content.native_source, ZeroCheckpoint) and content.native_source.has_autoep:
        what = "has AutoEP experts, whose files cannot be written"
        mend = "load it in a run with import ds_reshard.auto, under any sizes; or convert it to another format"
        yield UnsupportedLayout.fault(content.folder, what, mend=mend)


def _stage_faults(saving: Saving) -> Iterator[Fault]:
    """Refuse stages whose flat buffers are not in one stage's order, as DeepSpeed fills them by position.

    Also if there are no files of layers, which say what is in them: ds_to_universal copies none.
    """
    content, source = saving.content, saving.source
    if not saving.layers:
        what = "has no files of layers, which a PipelineModule loads: ds_to_universal copies none"
        mend = "--like a folder that the new run has saved, or --names for the files of a plain module"
        yield UnsupportedLayout.fault(content.folder, what, "layer_00-model_00-model_states.pt", "none", mend=mend)
    columns = source.columns if source is not None else ()
    if any(list(buffer.shapes) != ties_first(buffer.shapes) for column in columns for buffer in column.buffers):
        what, mend = "has its parameters in another order than its module", "load it in a run, and save there"
        yield UnsupportedLayout.fault(content.folder, what, "tied modules first", "others", mend=mend)


def _notes(zero: ZeroCheckpoint) -> Iterator[str]:
    placements = zero.layout.placements.values()
    replicas = {one.key.name for one in placements if any(holder.stage for holder, _ in one.replicas)}
    copies = sorted(replicas | {name for of_tp_rank in zero.copies for name, _ in of_tp_rank})
    if copies:
        yield f"several stages have a copy of {', '.join(copies[:8])}: the first stage's copies are shown"
    unsaved = [name for name in zero.model.trainable if TensorKey(name, WEIGHT) not in zero.layout and zero.stages]
    if unsaved and zero.universal is None:
        why = "all TiedLayerSpecs of their first stage have a forward_fn"
        yield f"no file has the weights of {', '.join(unsaved[:8])}: {why}"
    if zero.universal is not None and zero.stages:
        yield "ds_to_universal keeps no buffers and no frozen parameters of a PipelineModule: they are in no file"
    if zero.universal is not None and len(zero.stages) > 1:
        yield "its param groups are the first stage's; other stages' groups are matched by position, as DeepSpeed does"
    note = note_on_unnamed(zero.splits)
    yield from [note] if note else ()
    if zero.stage == 0:
        yield "a ZeRO 0 checkpoint names no tensor of its optimizer: weights and buffers only"
    if zero.listing.partitioned_model and zero.model.buffer_names and zero.dp > 1:
        yield "each rank of ZeRO 3 saves its buffers: those of the first rank are shown"
    for number, partition in enumerate(zero.optim.partitions if zero.optim else ()):
        for kind, shape in partition.unreshardable.items():
            yield f"{kind} of flat buffer {number} ({shape}) is not shaped like the parameters: left out"


def list_folder(folder: str) -> Listing:
    """Return the listing of a folder, whatever its files are."""
    entries = folders.entries(folder)
    files = {name: nbytes for name, nbytes in entries.items() if nbytes is not None}
    return read_listing(folder, files, frozenset(entries) - frozenset(files))


def _list(folder: str) -> Listing | None:
    listing = list_folder(folder)
    return listing if listing.model or listing.optim or listing.faults else None


def _as_zero_listing(listing: AnyListing) -> Listing:
    assert isinstance(listing, Listing)
    return listing


def _describe(listing: AnyListing) -> Inspection:
    result = survey(_as_zero_listing(listing))
    return describe_survey(result, tag=listing.tag)


def _survey(listing: AnyListing) -> SurveyReport:
    result = survey(_as_zero_listing(listing))
    return SurveyReport(faults=result.faults, further=tuple(_steps(result)))


def _steps(result: Survey) -> Iterator[Fault]:
    """Yield a fault for each param group or flat buffer of the first shard that is of another step than the others."""
    if result.optim is None:
        return
    of_buffers = {f"flat buffer {n}": part.scalars.get("step") for n, part in enumerate(result.optim.partitions)}
    of_groups: dict[str, object] = {f"param group {n}": g.get("step") for n, g in enumerate(result.optim.groups or ())}
    for steps in (of_buffers, of_groups):
        known: dict[str, object] = {name: step for name, step in steps.items() if step is not None}
        first = next(iter(known), "")
        for name, step in known.items():
            if canonical(step) != canonical(known[first]):
                yield CheckpointDamaged.fault(
                    result.optim.path,
                    f"{name} is of another step than {first}: a run steps all of them together",
                    describe(known[first]),
                    describe(step),
                    mend="restore the file from a copy, or load another tag",
                )


def _target(saving: Saving, request: ConversionRequest, like: Checkpoint | None) -> Target:
    """Return the target that a request asks for, with sizes from `like` if it has them; raises ConfigError."""
    if request.to == UNIVERSAL:
        return universal_target(saving)
    if request.ep not in (None, 1) and not any(expert_of(name) is not None for name in saving.trained):
        raise ConfigError(f"--ep {request.ep}: no parameter is an expert of deepspeed.moe; leave it out")
    run = like.zero if isinstance(like, OpenedZero) else None
    dp = request.dp or (run.dp if run is not None else saving.dp)
    if run is not None and run.listing.experts:
        like = run = None  # its param groups were taken already
    if (like is not None and run is None) or request.pp not in (None, run.grid.pp if run is not None else 1):
        what = "no file says which layers the new run's stages have; give a DeepSpeed folder that such a run has saved"
        raise ConfigError(f"--pp {request.pp or ''}: {what}: --like DIR")
    tp = request.tp or (run.grid.tp if run is not None else 1)
    if run is not None and run.grid.tp not in (1, tp):
        raise ConfigError(f"--tp {tp}: --like shows {run.grid.tp} tensor-parallel ranks; leave out --tp, or --like")
    return zero_target(saving, request.to, dp, tp=tp, like=run, sub_group=request.sub_group_size)


def _write(content: Content, request: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """Return any content as DeepSpeed's files."""
    subject = f"converting {content.folder} to {request.to}"
    if request.dp is None and like is None and request.to in FORMATS and content.ranks is None:
        raise ConfigError(
            f"--dp: no file of {content.folder} says how many ranks saved it; give the new run's number: --dp N"
        )
    raise_faults([*faults, *content.faults], subject=subject)
    raise_faults([unnamed_optimizer_fault(content.folder, 0)] if content.facts is None else [], subject=subject)
    raise_faults([*optimizer_faults(content), *_unsupported_expert_faults(content, request.to)], subject=subject)
    run = like.zero if isinstance(like, OpenedZero) and like.zero.listing.experts else None
    content = _with_expert_groups(content, request, run, subject)
    data_first = bool(run.model.config.get(DATA_FIRST)) if run is not None else None
    saving = Saving(content=content, data_first=data_first)
    stages = saving.layers is not None and request.to in ("zero1", "bf16") and like is None
    raise_faults(list(_stage_faults(saving)) if stages else [], subject=subject)
    target = _target(saving, request, like)
    notes = (*([_ONE_STAGE] if stages else ()), *_frozen_note(saving, request), *_scale_note(saving, request))
    return replace(target, notes=(*target.notes, *notes, *_content_notes(content)))


def _with_expert_groups(
    content: Content, request: ConversionRequest, run: ZeroCheckpoint | None, subject: str
) -> Content:
    """Return the content with the new run's param groups of experts."""
    sizes = {run.dp // column.dp for column in run.columns} - {1} or {1} if run is not None else set()
    if request.ep is not None and sizes and sizes != {request.ep}:
        raise ConfigError(f"--ep {request.ep}: --like shows {', '.join(map(str, sorted(sizes)))}; leave one out")
    regrouped, faults = groups_for_ep(content, request.ep, run)
    raise_faults(faults, subject=subject)
    dp, groups = request.dp or (run.dp if run is not None else content.ranks) or 1, regrouped.facts
    for ep in {ep_of(group) for group in groups.groups} if groups is not None else ():
        if dp % ep:
            raise ConfigError(f"--ep {ep}: {dp} data-parallel ranks are not a multiple of it; give one: --dp N")
    return regrouped


_ONE_STAGE = "the files are those of a PipelineModule of one stage; give --names for those of a plain module"


def _scale_note(saving: Saving, request: ConversionRequest) -> Iterator[str]:
    """Note what stage 3 does to an fp16 run: it takes over any loss scale that it finds, and stops without one."""
    if request.to == "zero3" and "loss_scaler" not in saving.scaling:
        yield (
            "no loss scale was saved, and 1 is written: an fp16 run at stage 3 continues unscaled if DeepSpeed "
            "alone loads it. --to zero2, or import ds_reshard.auto in the run, keeps the run's scale"
        )


def _frozen_note(saving: Saving, request: ConversionRequest) -> Iterator[str]:
    """Note that no file says whether some weights are frozen parameters or buffers, which stage 3 tells apart.

    Tried with DeepSpeed 0.19.8: its stages 1 and 2 load either from the whole tensor in the module. Its stage 3 wants a
    buffer whole and a frozen parameter as a placeholder beside its fragments; it stops at the other's shape, in
    `load_module_state_dict` (engine.py), so no file is right for both. It never goes wrong silently.
    """
    names = sorted(saving.frozen)
    if request.to == "zero3" and names:
        yield (
            f"in no param group, and written as frozen parameters: {', '.join(names[:8])}"
            f"{f' and {len(names) - 8} others' if len(names) > 8 else ''}. If one is a buffer of the module, "
            "DeepSpeed's own load of stage 3 stops at its shape: --to zero2 holds either, and a run of stage 3 loads "
            "that with import ds_reshard.auto"
        )


def _content_notes(content: Content) -> Iterator[str]:
    """Note how a content is written in DeepSpeed's files, and what is left out."""
    groups = len(content.facts.groups) if content.facts is not None else 0
    if content.schedule is not None:
        yield f"the scheduler is saved as a LambdaLR with {groups} param groups: the new run's must be one, too"
    elif SCHEDULER not in content.entries:
        yield "no scheduler was saved, and none is written"
    scalars = content.facts.scalars.values() if content.facts is not None else ()
    if content.steps is None and not any("step" in states for states in scalars):
        yield "no file says how many steps were made: global_steps is 0"
    if content.batch_size is not None:
        yield f"the saving run's global batch was {content.batch_size} samples: train_batch_size {content.batch_size}"
    if content.extra_entries:
        yield f"entries of the saving run are in the client state: {', '.join(content.extra_entries)}"
    sizes = sorted({ep_of(group) for group in content.facts.groups} - {1}) if content.facts is not None else []
    if any(expert_of(name) is not None for name in content.trained):
        size = " and ".join(map(str, sizes)) or "1"
        yield f"experts are written for expert-parallel size {size}; at another, load them with import ds_reshard.auto"
    if len(sizes) > 1:
        yield (
            "groups of several expert-parallel sizes are in the order of --like. DeepSpeed orders them by the hashes "
            "of their names: start the new run with the PYTHONHASHSEED of that run"
        )
    yield from content.notes


WRITES = (*FORMATS, UNIVERSAL)
ZERO = Format(
    name="DeepSpeed",
    list=_list,
    open=lambda listing: OpenedZero(_as_zero_listing(listing)),
    open_weights=lambda listing: OpenedZero(_as_zero_listing(listing), optimizer=False),
    describe=_describe,
    survey=_survey,
    writes=dict.fromkeys(WRITES, _write),
    sized=frozenset(FORMATS),
    in_parts=True,
    latest={"latest": str, "latest_universal": str},
)
