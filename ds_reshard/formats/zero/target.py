"""Write content as DeepSpeed's files: what a run saves in them, and a tree of objects for each file.

The entries are those of `_save_checkpoint` (deepspeed/runtime/engine.py, 0.19.8) and of the optimizers' `state_dict`
(runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py). Everything that does not depend on the layout is written
as it was saved, including the user's entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import isfinite, prod
from typing import NamedTuple

from ds_reshard.containers.torch_zip_writer import Pickled, pickled
from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.content import UNSET, whole_tensors
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, arrange_buffers, slice_numel, sliced_weight, whole_placement
from ds_reshard.formats.zero.groups import ep_of
from ds_reshard.formats.zero.model_states import IdentityCache, ModelStates, section
from ds_reshard.formats.zero.modules import expert_of, experts_per_rank, layer_files, names_on_ep_rank
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.tensor_parallel import (
    SplitEvidence,
    TensorSplit,
    UnknownSplit,
    evidence_of,
    find_splits,
    matching_rules,
    resplit,
    unknown_split_faults,
)
from ds_reshard.model.content import WEIGHT, Content
from ds_reshard.model.facts import GroupFacts, Scalar, ScalarTensor, canonical, exact_number
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, SizeRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import active_rules, use_rules

VERSION = "0.19.8"
"""The DeepSpeed version whose files are written; its loaders check the version in a file."""
DATA_FIRST = "use_data_before_expert_parallelism"
INFO = "universal_checkpoint_info"
UNIVERSAL_INFO = {"universal_checkpoint_version": 0.4}
"""ds_to_universal's entry if the script has none (UNIVERSAL_CHECKPOINT_VERSION_VALUE, checkpoint/constants.py)."""
_SCALER = GlobalName(module="deepspeed.runtime.fp16.loss_scaler", name="LossScaler")
_STAGE = GlobalName(module="deepspeed.runtime.zero.config", name="ZeroStageEnum")
_ADDRESS = GlobalName(module="deepspeed.utils.tensor_fragment", name="fragment_address")
_SCALER_ENTRIES = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_HALF_TYPES = {ElementType.BFLOAT16: "bf16", ElementType.FLOAT16: "fp16"}


class Splits(NamedTuple):
    """The whole tensors of a checkpoint by name, and what tells how tensor-parallel ranks split them.

    `saved` are the splits of tensors that the saving run's ranks had split, `evidence` is what its files say of others.
    """

    folder: str
    shapes: Mapping[str, Shape]
    saved: Mapping[str, TensorSplit]
    evidence: SplitEvidence

    def for_tp(self, tp: int) -> tuple[dict[str, TensorSplit], list[Fault]]:
        """Return how `tp` ranks split each tensor: as the saving ranks did, or by rules and patterns; and faults."""
        unsplit_shapes = {name: [shape] for name, shape in self.shapes.items() if name not in self.saved}
        # ds_to_universal's mark, with which DeepSpeed takes all as cut along dimension 0, is no evidence
        evidence = SplitEvidence() if self.evidence.info == UNIVERSAL_INFO else self.evidence
        known, unknown_splits = find_splits(unsplit_shapes, evidence, active_rules())
        known |= {name: split for name, split in self.saved.items() if name in self.shapes}
        splits: dict[str, TensorSplit] = {}
        for name, split in known.items():
            try:
                splits[name] = resplit(split, self.shapes[name], tp)
            except UnknownSplit as error:
                unknown_splits[name] = error
        faults = unknown_split_faults(unknown_splits, self.folder)
        sizes = sorted({split.shape[0] for split in splits.values() if split.vocabulary})
        if len(sizes) > 1:
            what, mend = "has two vocabularies, and DeepSpeed's files hold the size of one", "convert it at --tp 1"
            faults.append(UnsupportedLayout.fault(self.folder, what, "one size", ", ".join(map(str, sizes)), mend=mend))
        return splits, faults

    def all_known(self) -> Mapping[str, TensorSplit]:
        """Return how ranks split each tensor, as far as it is known: also of tensors that one rank had whole."""
        if not active_rules() and self.evidence.info in ({}, UNIVERSAL_INFO):
            return self.saved
        return {**self.for_tp(1)[0], **self.saved}


def known_splits(checkpoint: ZeroCheckpoint) -> Splits:
    """Return what a DeepSpeed folder says of how its tensors are split."""
    model = checkpoint.model
    shapes = {name: tensor.shape for name, tensor in whole_tensors(model).items() if name not in model.buffer_names}
    return Splits(checkpoint.listing.folder, shapes, checkpoint.splits, evidence_of(model))


@dataclass(frozen=True, kw_only=True)  # not slotted: what follows from the content is made once
class Saving:
    """Content as a run of DeepSpeed saves it, and what the files say of that run beside tensors.

    Content of DeepSpeed files keeps their configuration, version and loss scale. `source_shards` are such files if they
    are rewritten, with entries that no content has. `data_first` is the order of ranks with the same experts.
    """

    content: Content
    source_shards: ZeroShards | None = None
    data_first: bool | None = None

    @property
    def source(self) -> ZeroCheckpoint | None:
        """Return the DeepSpeed folder that the content was read from, or None."""
        return self.content.native_source if isinstance(self.content.native_source, ZeroCheckpoint) else None

    @property
    def dp(self) -> int:
        return self.content.ranks or 1

    @property
    def tag(self) -> str:
        return self.content.tag if self.source_shards is None else self.source_shards.checkpoint.listing.tag

    @cached_property
    def groups(self) -> tuple[GroupFacts, ...]:
        """Return the param groups, with numbers for hyper-parameters that were saved as small tensors."""
        return tuple(map(_group_with_numbers, self.content.facts.groups)) if self.content.facts is not None else ()

    @cached_property
    def trained(self) -> Mapping[str, Shape]:
        """Return the whole shapes of the parameters of all param groups."""
        states = {name: next(iter(kinds.values())) for name, kinds in self.content.trained.items()}
        tensors = {**states, **self.content.weights}
        return {name: tensors[name].shape for group in self.groups for name in group.members if name in tensors}

    @cached_property
    def frozen(self) -> Mapping[str, tuple[Shape, ElementType]]:
        """Return parameters that no optimizer owns, each under its first name; files of stage 1 do not list them."""
        tensors = {name: (tensor.shape, tensor.dtype) for name, tensor in self.content.weights.items()}
        if self.source_shards is not None:
            model = self.source_shards.checkpoint.model
            shapes = {**{name: tensor.shape for name, tensor in model.module.items()}, **model.frozen_shapes}
            tensors = {
                name: (shapes[name], model.module[name].dtype)
                for name in model.frozen_shapes or model.module
                if name in model.module
            }
        others = {*self.trained, *self.content.buffers, *self.tied, *self.content.tied}
        return {name: tensor for name, tensor in tensors.items() if name not in others}

    @property
    def tied(self) -> Mapping[str, str]:
        """Return the other names of parameters, with the first name, as files list them."""
        return self.content.tied if self.source_shards is None else self.source_shards.checkpoint.model.shared

    @cached_property
    def layers(self) -> Mapping[str, Mapping[str, TensorKey]] | None:
        """Return the files of layers of a PipelineModule, or None if the names are not its own."""
        names = {*self.content.weights, *self.content.tied}
        unchanged = self.source is not None and self.source.stages and self.source.model.module.keys() == names
        return layer_files(self.source) if self.source is not None and unchanged else None

    @cached_property
    def splits(self) -> Splits:
        """Return what tells how ranks split the tensors, by their names in the content."""
        if self.source_shards is not None:
            return known_splits(self.source_shards.checkpoint)
        shapes = {name: t.shape for name, t in self.content.weights.items() if name not in self.content.buffers}
        evidence = evidence_of(self.source.model)._replace(info={}) if self.source is not None else SplitEvidence()
        return Splits(self.content.folder, shapes, self._saved_splits() if self.source is not None else {}, evidence)

    def _saved_splits(self) -> dict[str, TensorSplit]:
        """Return how the saving ranks split tensors, and patterns' splits of whole tensors that no rule matches."""
        assert self.source is not None
        with use_rules(()):  # the user's rules are for the names in the content
            known = known_splits(self.source).all_known()
        rules = () if self.source.splits else active_rules()
        return {
            key.name: known[tensor.origin.name]
            for key, tensor in self.content.tensors.items()
            if tensor.origin.name in known and not matching_rules(key.name, rules)
        }

    @cached_property
    def config(self) -> Mapping[str, object]:
        """Return the saved DeepSpeed JSON, empty if its path was saved instead."""
        return section(self.entries, "ds_config")

    @property
    def version(self) -> str:
        return self.source.model.version if self.source is not None else VERSION

    @cached_property
    def types(self) -> set[ElementType]:
        """Return the element types in which parameters were trained."""
        tensors = self.content.weights if self.source_shards is None else self.source_shards.checkpoint.model.module
        return {tensors[name].dtype for name in self.trained if name in tensors}

    @property
    def wraps_bf16(self) -> bool:
        """True if the run trained in bf16: by the saved JSON, or without it by the names of files and the weights."""
        if isinstance(self.entries.get("ds_config"), dict):
            return section(self.config, "bf16" if "bf16" in self.config else "bfloat16").get("enabled") is True
        has_prefix = self.source is not None and self.source.listing.optim_prefix == "bf16_"
        return has_prefix or ElementType.BFLOAT16 in self.types

    @property
    def prefix(self) -> str:
        """Return the prefix of DeepSpeed's optimizer files, for bf16 runs (`_get_zero_ckpt_prefix`, engine.py)."""
        if self.source is not None and self.source.columns:
            return self.source.listing.optim_prefix
        return "bf16_" if self.wraps_bf16 else ""

    @property
    def keeps_data_first(self) -> bool:
        """True if ranks with the same experts are neighbours (`_create_expert_and_data_parallel`, utils/groups.py)."""
        return bool(self.config.get(DATA_FIRST))

    @cached_property
    def scaling(self) -> dict[str, object]:
        """Return loss scale and clipping of the saving run; for bf16, whose wrapper saves none, a scale of 1.

        In another precision DeepSpeed keeps the new run's loss scale if the file has none, and so it does `clip_grad`.
        """
        entries = self.source.optimizer_entries if self.source is not None else {}
        default = no_scale() if self.types == {ElementType.BFLOAT16} else {}
        return {**default, **{key: entries[key] for key in _SCALER_ENTRIES if key in entries}}

    def source_model(self, rank: int) -> ModelStates | None:
        """Return the source's model file of a rank, or else the first rank's; None if no files are rewritten."""
        if self.source_shards is None:
            return None
        model = self.source_shards.checkpoint
        return self.source_shards.model_states(rank) if rank < model.dp and rank in model.listing.model else model.model

    @cached_property
    def entries(self) -> Mapping[str, object]:
        """Return the top level of a model file. If no file says the steps, they are the optimizer's.

        Without `global_samples` DeepSpeed counts them from the steps itself (`_load_checkpoint`, engine.py).
        """
        if self.source_shards is not None:
            return self.source_shards.checkpoint.model.entries
        content, source_entries = self.content, self.source.model.entries if self.source is not None else {}
        types = {weight.dtype for name, weight in content.weights.items() if name in content.trained}
        config: dict[str, object] = {name: {"enabled": True} for dtype, name in _HALF_TYPES.items() if dtype in types}
        if content.batch_size is not None:
            config["train_batch_size"] = content.batch_size
        saved_config = source_entries.get("ds_config", config)
        config_dict = saved_config if isinstance(saved_config, dict) else {}
        if self.data_first not in (None, bool(config_dict.get(DATA_FIRST))):
            saved_config = {**config_dict, DATA_FIRST: self.data_first}
        scalars = content.facts.scalars.values() if content.facts is not None else ()
        saved_steps = [states["step"] for states in scalars if "step" in states]
        steps = [exact_number(step) if isinstance(step, ScalarTensor) else step for step in saved_steps]
        return {
            **dict.fromkeys((*UNSET, "lr_scheduler", "data_sampler", "random_ltd")),
            **({"sparse_tensor_module_names": set()} if not source_entries else {}),  # for loaders before 0.15
            "skipped_steps": 0,
            "global_steps": int(
                max((step for step in steps if isinstance(step, int | float) and isfinite(step)), default=0)
            ),
            **content.entries,
            "module": None,
            "buffer_names": sorted(content.buffers),
            "dp_world_size": self.dp,
            "mp_world_size": 1,
            "ds_config": saved_config,
            "ds_version": source_entries.get("ds_version", VERSION),
        }

    def module(self, source: ModelStates | None) -> OrderedDict[str, object]:
        """Return the module's entries in their order, with torch's versions if the model file `source` is rewritten."""
        if source is not None:
            entries = source.entries["module"]
            assert isinstance(entries, dict)
            names = source.module.keys() | source.objects.keys()
            module: OrderedDict[str, object] = OrderedDict((n, value) for n, value in entries.items() if n in names)
            if isinstance(entries, OrderedDict):
                vars(module).update(vars(entries))
            return module
        tensors = {
            name: new_tensor(f"module/{name}", held.shape, held.dtype) for name, held in self.content.weights.items()
        }
        tied = {name: tensors[first] for name, first in self.content.tied.items()}
        records = self.content.records
        buffers = {name: records[name] for name in sorted(self.content.buffers & records.keys())}
        return OrderedDict({**tensors, **tied, **buffers})


def _group_with_numbers(group: GroupFacts) -> GroupFacts:
    """Turn one-element tensors of a param group into numbers; `optimizer_faults` refuses those that are none."""
    values = {
        name: exact_number(value) if isinstance(value, ScalarTensor) else value
        for name, value in (group.hyperparameters or {}).items()
    }
    return GroupFacts(members=group.members, hyperparameters=values)


@dataclass(frozen=True, kw_only=True)  # not slotted: each file of an expert asks for the whole tensors
class Column:
    """The files of one tensor-parallel rank of one stage of a run at data-parallel size `dp`, one for each rank.

    `kind` is the optimizer's wrapper ("zero", "bf16" or "zero3"), `stage` that of ZeRO. `shards` are the shapes of this
    column's shards of tensors, all others are whole; `small` are the trained parameters of which it has no element.
    `layers` are its files of layers, and `entries` replace those of a single rank's files.
    """

    saving: Saving
    kind: str
    stage: int
    dp: int
    groups: Sequence[GroupFacts]
    buffers: tuple[FlatBuffer, ...] = ()
    number: int = 0
    shards: Mapping[str, Shape] = field(default_factory=dict)
    small: Collection[str] = ()
    layers: Mapping[str, Mapping[str, TensorKey]] | None = None
    entries: Mapping[str, object] = field(default_factory=dict)
    _first_file: IdentityCache[Pickled] = field(default_factory=lambda: IdentityCache(), init=False)
    _other_files: IdentityCache[Pickled] = field(default_factory=lambda: IdentityCache(), init=False)

    @property
    def model_files(self) -> int:
        return self.dp if self.stage == 3 else 1

    def with_shards(self, shards: Mapping[str, Shape], sub_group_numel: int | None) -> tuple[Column, list[Fault]]:
        """Return the column of a rank with these shards, and faults of flat buffers that would hold different states.

        A shard may be empty. `sub_group_numel` is for stage 3.
        """
        saving, trained, faults = self.saving, self.saving.trained, list[Fault]()
        members = [[name for name in group.members if name in trained] for group in self.groups]
        small = [name for names in members for name in names if 0 in shards.get(name, ()) and 0 not in trained[name]]
        order = [{name: shards.get(name, trained[name]) for name in names if name not in small} for names in members]
        sizes = [ep_of(group) for group in self.groups]
        first_rank = [dict(islice(shapes.items(), len(shapes) // ep)) for shapes, ep in zip(order, sizes, strict=True)]
        ranks, sub_group_numel = [self.dp // ep for ep in sizes], sub_group_numel if self.stage == 3 else None
        buffers = arrange_buffers(first_rank, RULES[self.kind], ranks, sub_group_numel=sub_group_numel)
        states, facts = saving.content.trained, saving.content.facts
        for number, buffer in enumerate(buffers):
            names = order[buffer.group] if sizes[buffer.group] > 1 else buffer.shapes
            kinds = {name: {kind: tensor.dtype for kind, tensor in states.get(name, {}).items()} for name in names}
            scalars = {name: facts.scalars.get(name, {}) if facts is not None else {} for name in names}
            first = next(iter(buffer.shapes))
            for name in names:
                if kinds[name] != kinds[first] or canonical(dict(scalars[name])) != canonical(dict(scalars[first])):
                    what = "has other optimizer states than its param group's first parameter"
                    what += ", and a flat buffer holds the same states of all"
                    mend = "--to universal, which keeps states for each parameter"
                    expected = f"the states and steps of {first}"
                    faults.append(UnsupportedLayout.fault(name, what, expected, "others", mend=mend))
            buffers[number] = replace(buffer, kinds=kinds[first], scalars=scalars[first])
        return replace(self, buffers=tuple(buffers), shards=shards, small=small), faults

    def placements(self) -> Iterator[Placement]:
        """Yield where the column's tensors lie among the files of all columns."""
        for buffer in self.buffers:
            for ep_rank in range(self.dp // buffer.ranks):
                for placement in self.for_ep_rank(buffer, ep_rank).placements(OPTIM):
                    yield _shift_shards(placement, self.number * self.dp)
        for placement in self.weights():
            yield _shift_shards(placement, self.number * self.model_files)

    def for_ep_rank(self, buffer: FlatBuffer, ep_rank: int) -> FlatBuffer:
        """Return a flat buffer of experts as the ranks with expert-parallel rank `ep_rank` have it."""
        ep = self.dp // buffer.ranks
        counts = experts_per_rank(self.saving.trained, ep) if ep > 1 else {}
        first, step = (ep_rank * buffer.ranks, 1) if self.saving.keeps_data_first else (ep_rank, ep)
        shapes = dict(zip(names_on_ep_rank(buffer.shapes, counts, ep_rank), buffer.shapes.values(), strict=True))
        return replace(buffer, shapes=shapes, first=first, step=step)

    def share(self, buffer: FlatBuffer, rank: int) -> int:
        """Return which partition of a flat buffer a rank has, among the ranks with the same parameters."""
        return rank % buffer.ranks if self.saving.keeps_data_first else rank // (self.dp // buffer.ranks)

    def used(self, buffer: FlatBuffer, rank: int) -> int:
        """Return the elements of a rank's partition that are not padding at the end."""
        return buffer.used_numel(self.share(buffer, rank))

    def optimizer_tree(self, rank: int) -> dict[str, object]:
        """Return the object that torch.save gets for one rank's optimizer file."""
        entries = self._zero3() if self.kind == "zero3" else self._flat(rank)
        config, version = self.saving.entries.get("ds_config"), self.saving.version
        return {"optimizer_state_dict": entries, "ds_config": config, "ds_version": version}

    def data(self) -> dict[str, bytes]:
        """Return the bytes of buffers that hold no tensor of the content: scalar states."""
        return {
            _buffer(name, number): value.data
            for number, flat in enumerate(self.buffers)
            for name, value in flat.scalars.items()
            if isinstance(value, ScalarTensor)
        }

    def _base(self) -> dict[str, object]:
        """Return the state dict of the wrapped optimizer, with padded flat tensors."""
        state: dict[int, dict[str, object]] = {}
        members: dict[int, list[int]] = {}
        for number, flat in enumerate(self.buffers):
            members.setdefault(flat.group, []).append(number)
            states: dict[str, object] = {
                name: _scalar(_buffer(name, number), value) for name, value in flat.scalars.items()
            }
            for kind, dtype in flat.kinds.items():
                if kind != "fp32":
                    states[kind] = new_tensor(f"{kind}/{number}", (flat.partition_numel,), dtype)
            if states:
                state[number] = states
        groups = [
            {**(group.hyperparameters or {}), "params": members.get(g, [])} for g, group in enumerate(self.groups)
        ]
        return {"state": state, "param_groups": groups}

    def _masters(self, rank: int) -> list[TensorRecord]:
        sizes = [self.used(flat, rank) if self.kind == "zero" else flat.partition_numel for flat in self.buffers]
        return [
            new_tensor(f"fp32/{number}", (size,), flat.kinds["fp32"], requires_grad=True)
            for number, (flat, size) in enumerate(zip(self.buffers, sizes, strict=True))
        ]

    def _flat(self, rank: int) -> dict[str, object]:
        """Return the entries of one rank's file at stages 1 and 2."""
        saved = self.saving.scaling
        paddings = [flat.partition_numel - self.used(flat, rank) for flat in self.buffers]
        if self.kind == "bf16":  # the last rank saves the whole padding (`group_paddings` in bf16_optimizer.py)
            is_last = [self.share(flat, rank) == flat.ranks - 1 for flat in self.buffers]
            all_paddings = [flat.partition_numel * flat.ranks - flat.numel for flat in self.buffers]
            paddings = [numel if last else 0 for numel, last in zip(all_paddings, is_last, strict=True)]
        entries: dict[str, object] = {
            key: saved[key] for key in _SCALER_ENTRIES if key in saved and (self.kind != "bf16" or key == "clip_grad")
        }
        entries["base_optimizer_state"] = self._base()
        entries["single_partition_of_fp32_groups"] = self._masters(rank)
        if self.kind == "zero":
            entries["zero_stage"] = ObjectRecord(callable=_STAGE, args=(self.stage,))
        entries["group_paddings"] = paddings
        if self.kind == "zero":
            entries["param_alignment_paddings"] = [[0] * len(flat.shapes) for flat in self.buffers]
        entries["partition_count"] = [flat.ranks for flat in self.buffers]
        entries["ds_version"] = self.saving.version
        entries["param_slice_mappings"] = [self._addresses(flat, rank) for flat in self.buffers]
        return entries

    def _addresses(self, flat: FlatBuffer, rank: int) -> OrderedDict[str, object]:
        """Return each parameter's range in the partition, as `fragment_address(numel, start)`."""
        addresses: OrderedDict[str, object] = OrderedDict()
        for name, cut in flat.cuts():
            piece = cut.piece(self.share(flat, rank), prod(flat.shapes[name]))
            if piece is not None:
                state = {"numel": piece.stop - piece.start, "start": piece.element_offset}
                addresses[name] = ObjectRecord(callable=_ADDRESS, by_new=True, state=state, has_state=True)
        return addresses

    def _zero3(self) -> dict[str, object]:
        scaling = {**no_scale(), **self.saving.scaling}
        return {
            "zero_stage": ObjectRecord(callable=_STAGE, args=(3,)),
            **{key: scaling[key] for key in _SCALER_ENTRIES if key in scaling},  # stage 3 ignores clip_grad
            "partition_count": self.dp,
            "optimizer_state_dict": self._base(),
            "fp32_flat_groups": self._masters(0),
        }

    @cached_property
    def _tensors(self) -> Mapping[str, TensorRecord]:
        """Return each weight under its first name, in a separate storage."""
        return {
            name: new_tensor(f"module/{name}", self.shards.get(name, weight.shape), weight.dtype)
            for name, weight in self.saving.content.weights.items()
        }

    def weights(self) -> Iterator[Placement]:
        """Yield where weights lie in the model files."""
        if self.stage == 3:
            for name, (shape, dtype) in self._frozen().items():
                if prod(shape):
                    yield sliced_weight(name, shape, dtype, self.dp, family=MODEL, buffer=f"frozen/{name}")
            return
        tensors = self._tensors
        keys = [TensorKey(name, WEIGHT) for name in tensors]
        if self.layers is not None:
            keys = list(dict.fromkeys(key for entries in self.layers.values() for key in entries.values()))
        for key in keys:
            tensor = tensors[key.name]
            placement = whole_placement(key.name, WEIGHT, tensor.shape, tensor.dtype, family=MODEL, buffer=_weight(key))
            yield placement._replace(key=key)

    def model_file(self, rank: int) -> Pickled:
        """Return one model file, without the weights that are in other files and the mark of a universal checkpoint.

        A rank's own saved file may have other buffers and entries; if it has none, the first rank's is rewritten. Ranks
        with equal saved files get equal new ones, pickled once; only the first lists ties. Thread-safe.
        """
        source = self.saving.source_model(0 if self.entries else rank)
        cache = self._other_files if rank else self._first_file
        entries = source.entries if source is not None else self.saving.entries

        def make() -> Pickled:
            tree = self.model_tree(rank, source)
            if tree.get(INFO) == UNIVERSAL_INFO:
                del tree[INFO]
            module = tree["module"]
            assert isinstance(module, OrderedDict)
            for name in {key.name for weights in self.separate_files.values() for key in weights.values()}:
                del module[name]
            return pickled({**tree, "module": None} if self.layers is not None else tree)

        return cache.get(entries, len(self.saving.content.tensors), make)

    def model_tree(self, rank: int, source: ModelStates | None) -> dict[str, object]:
        """Return the object that torch.save gets for a model file, which may be made of the model file `source`."""
        frozen = self._frozen()
        shapes = OrderedDict((name, SizeRecord(shape)) for name, (shape, _) in frozen.items())
        fragments: OrderedDict[str, object] = OrderedDict()
        module = self._module(source)
        for name, (shape, dtype) in frozen.items():
            fragments[name] = (
                new_tensor(f"frozen/{name}", (slice_numel(shape, self.dp),), dtype) if self.stage == 3 else module[name]
            )
        # None if the save left frozen parameters out: if DeepSpeed finds some, it wants all (engine.py, 0.19.8).
        keeps_frozen = self.stage >= 2 and bool(frozen)
        changed = {
            "module": module,
            "param_shapes": [
                OrderedDict((name, SizeRecord(shape)) for name, shape in flat.shapes.items()) for flat in self.buffers
            ],
            "frozen_param_shapes": shapes if keeps_frozen else None,
            "shared_params": dict(self.saving.tied) if rank == 0 else {},
            "frozen_param_fragments": fragments if keeps_frozen else None,
            "dp_world_size": self.dp,
        }
        experts: dict[str, set[int]] = {}
        for layer, number, _ in filter(None, map(expert_of, module)):
            experts.setdefault(layer, set()).add(number)
        entries = {**(source.entries if source is not None else self.saving.entries), **self.entries}
        return {**entries, **({"num_experts": [*map(len, experts.values())]} if experts else {}), **changed}

    @cached_property
    def separate_files(self) -> Mapping[str, Mapping[str, TensorKey]]:
        """Return the files of layers or experts (`_get_expert_ckpt_name`, engine.py), with their weights by entry."""
        layers: dict[str, int] = {}
        files: dict[str, dict[str, TensorKey]] = {}
        for name in self._tensors if self.stage < 3 else ():
            if (parts := expert_of(name)) is not None:
                layer = layers.setdefault(parts[0], len(layers))
                file = f"layer_{layer}_expert_{parts[1]}_mp_rank_00_model_states.pt"
                files.setdefault(file, {})[name] = TensorKey(name, WEIGHT)
        return files or self.layers or {}

    def separate_tree(self, entries: Mapping[str, TensorKey]) -> dict[str, object]:
        """Return the object that torch.save gets for the file of a layer or an expert."""
        tensors = self._tensors
        return {
            entry: new_tensor(_weight(key), tensors[key.name].shape, tensors[key.name].dtype)
            for entry, key in entries.items()
        }

    def _frozen(self) -> dict[str, tuple[Shape, ElementType]]:
        """Return parameters that this column's optimizer does not own: DeepSpeed counts empty ones as such."""
        frozen = {name: (self.shards.get(name, shape), dtype) for name, (shape, dtype) in self.saving.frozen.items()}
        return {**frozen, **{name: (self.shards[name], self._tensors[name].dtype) for name in self.small}}

    def _module(self, source: ModelStates | None) -> OrderedDict[str, object]:
        """Return the module's entries. Stage 3 saves parameters empty; tied weights then share a placeholder."""
        tensors, content, module = self._tensors, self.saving.content, self.saving.module(source)
        placeholders: dict[str, TensorRecord] = {}
        for name, value in module.items():
            if self.stage < 3:
                module[name] = tensors.get(content.tied.get(name, name), value)
            elif name not in content.buffers and isinstance(value, TensorRecord):
                first = self.saving.tied.get(name, name)
                module[name] = placeholders.setdefault(first, new_tensor(f"empty/{first}", (0,), value.dtype))
        return module


def _weight(key: TensorKey) -> str:
    """Return the buffer of a weight, or of its copy in another file."""
    return f"module/{key.name}" if not key.copy else f"module/{key.name}/{key.copy}"


def _shift_shards(placement: Placement, first: int) -> Placement:
    cut = placement.cut._replace(first=placement.cut.first + first)
    return placement._replace(cut=cut, replicated=False) if first or placement.replicated else placement


def no_scale() -> dict[str, object]:
    """Return what stage 3 needs if no loss scale was saved (`_rigid_load_state_dict`, zero/stage3.py, 0.19.8)."""
    scaler = ObjectRecord(callable=_SCALER, by_new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def _scalar(buffer: str, value: Scalar) -> object:
    return new_tensor(buffer, value.shape, value.dtype) if isinstance(value, ScalarTensor) else value


def _buffer(name: str, number: int) -> str:
    return f"scalar/{name}/{number}"
