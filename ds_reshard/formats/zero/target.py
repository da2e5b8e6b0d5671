"""A content that is to be written as DeepSpeed's files: what a run says in them, and a tree for each file.

The entries are those of `_save_checkpoint` (deepspeed/runtime/engine.py, 0.19.8) and of the optimizers' `state_dict`
(runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py). Everything that is not about the layout is taken over as
it was saved, the user's own entries too.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import isfinite, prod
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint
from ds_reshard.formats.zero.content import UNSET, whole_tensors
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, arranged, slice_numel, sliced, whole
from ds_reshard.formats.zero.groups import ep_of
from ds_reshard.formats.zero.model_states import ModelStates, section
from ds_reshard.formats.zero.modules import expert_of, experts_held, layer_files, of_place
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.tensor_parallel import (
    Division,
    Evidence,
    Misfit,
    divisions,
    evidence_of,
    redivided,
    unknown_faults,
)
from ds_reshard.model.content import WEIGHT, Content
from ds_reshard.model.facts import GroupFacts, Scalar, ScalarTensor, canonical, exact_number
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, SizeRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import active_rules, use_rules

VERSION = "0.19.8"
"""The DeepSpeed whose files are written; its loaders ask for the version that has saved."""
DATA_FIRST = "use_data_before_expert_parallelism"
INFO = "universal_checkpoint_info"
UNIVERSAL_INFO = {"universal_checkpoint_version": 0.4}
"""What ds_to_universal sets where a script has not (UNIVERSAL_CHECKPOINT_VERSION_VALUE, checkpoint/constants.py)."""
_SCALER = GlobalName(module="deepspeed.runtime.fp16.loss_scaler", name="LossScaler")
_STAGE = GlobalName(module="deepspeed.runtime.zero.config", name="ZeroStageEnum")
_ADDRESS = GlobalName(module="deepspeed.utils.tensor_fragment", name="fragment_address")
_KEPT = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_SIXTEEN = {ElementType.BFLOAT16: "bf16", ElementType.FLOAT16: "fp16"}


class Splits(NamedTuple):
    """The whole tensors of a checkpoint by name, and what tells how tensor-parallel ranks divide them.

    `divided` are those that ranks of the saving run had divided, `evidence` is what its files say of others.
    """

    folder: str
    shapes: Mapping[str, Shape]
    divided: Mapping[str, Division]
    evidence: Evidence

    def over(self, tp: int) -> tuple[dict[str, Division], list[Fault]]:
        """How `tp` ranks divide each tensor: as the saving ones did, or as a rule or a pattern says."""
        unsaid = {name: [shape] for name, shape in self.shapes.items() if name not in self.divided}
        # a mark of ds_to_universal, by which DeepSpeed takes all as cut along dimension 0, says nothing
        evidence = Evidence() if self.evidence.info == UNIVERSAL_INFO else self.evidence
        found, unknown = divisions(unsaid, evidence, active_rules())
        found |= {name: division for name, division in self.divided.items() if name in self.shapes}
        made: dict[str, Division] = {}
        for name, division in found.items():
            try:
                made[name] = redivided(division, self.shapes[name], tp)
            except Misfit as misfit:
                unknown[name] = misfit
        faults = unknown_faults(unknown, self.folder)
        sizes = sorted({division.shape[0] for division in made.values() if division.vocabulary})
        if len(sizes) > 1:
            what, mend = "has two vocabularies, and DeepSpeed's files have a place for one size", "convert it at --tp 1"
            faults.append(UnsupportedLayout.fault(self.folder, what, "one size", ", ".join(map(str, sizes)), mend=mend))
        return made, faults

    def known(self) -> Mapping[str, Division]:
        """How ranks divide each tensor, as far as it is known: those that one rank had whole, too."""
        if not active_rules() and self.evidence.info in ({}, UNIVERSAL_INFO):
            return self.divided
        return {**self.over(1)[0], **self.divided}


def splits_of(checkpoint: ZeroCheckpoint) -> Splits:
    """What a DeepSpeed folder says of how its tensors are divided."""
    model = checkpoint.model
    shapes = {name: tensor.shape for name, tensor in whole_tensors(model).items() if name not in model.buffer_names}
    return Splits(checkpoint.listing.folder, shapes, checkpoint.divided, evidence_of(model))


@dataclass(frozen=True, kw_only=True)  # not slotted: what follows from the content is made once
class Saving:
    """A content as a run of DeepSpeed saves it, and what the files say of that run beside tensors.

    A content of DeepSpeed's own files keeps their configuration, version and loss scale. `own` are these files, where
    the ones to be written go on from them, with entries that no content has. `data_first` is the order of a run's
    ranks with the same experts, None for the saved one.
    """

    content: Content
    own: ZeroShards | None = None
    data_first: bool | None = None

    @property
    def home(self) -> ZeroCheckpoint | None:
        """The DeepSpeed folder that the content was made of."""
        return self.content.native_source if isinstance(self.content.native_source, ZeroCheckpoint) else None

    @property
    def dp(self) -> int:
        return self.content.ranks or 1

    @property
    def tag(self) -> str:
        return self.content.tag if self.own is None else self.own.checkpoint.listing.tag

    @cached_property
    def groups(self) -> tuple[GroupFacts, ...]:
        """The param groups; hyper-parameters that were kept as small tensors are numbers to DeepSpeed."""
        return tuple(map(_plain_group, self.content.facts.groups)) if self.content.facts is not None else ()

    @cached_property
    def trained(self) -> Mapping[str, Shape]:
        """The parameters of all param groups, whole."""
        states = {name: next(iter(of.values())) for name, of in self.content.trained.items()}
        held = {**states, **self.content.weights}
        return {name: held[name].shape for group in self.groups for name in group.members if name in held}

    @cached_property
    def frozen(self) -> Mapping[str, tuple[Shape, ElementType]]:
        """Parameters that no optimizer owns, each under its first name; files of stage 1 do not list them."""
        held = {name: (one.shape, one.dtype) for name, one in self.content.weights.items()}
        if self.own is not None:
            model = self.own.checkpoint.model
            named = {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes}
            held = {
                name: (named[name], model.module[name].dtype)
                for name in model.frozen_shapes or model.module
                if name in model.module
            }
        apart = {*self.trained, *self.content.buffers, *self.tied, *self.content.tied}
        return {name: one for name, one in held.items() if name not in apart}

    @property
    def tied(self) -> Mapping[str, str]:
        """Other names of parameters, with the first one, as files list them."""
        return self.content.tied if self.own is None else self.own.checkpoint.model.shared

    @cached_property
    def layers(self) -> Mapping[str, Mapping[str, TensorKey]] | None:
        """The files of layers of a PipelineModule whose names are its own."""
        module = {*self.content.weights, *self.content.tied}
        own = self.home is not None and self.home.stages and self.home.model.module.keys() == module
        return layer_files(self.home) if self.home is not None and own else None

    @cached_property
    def splits(self) -> Splits:
        """What tells how ranks divide the tensors, by their names here."""
        if self.own is not None:
            return splits_of(self.own.checkpoint)
        shapes = {name: one.shape for name, one in self.content.weights.items() if name not in self.content.buffers}
        evidence = evidence_of(self.home.model)._replace(info={}) if self.home is not None else Evidence()
        return Splits(self.content.folder, shapes, self._divided() if self.home is not None else {}, evidence)

    def _divided(self) -> dict[str, Division]:
        """How the saving ranks divided tensors. Patterns tell of those that one rank had whole, if no rule does."""
        assert self.home is not None
        with use_rules(()):  # the rules are of the names here
            known = splits_of(self.home).known()
        rules = () if self.home.divided else active_rules()
        return {
            key.name: known[held.origin.name]
            for key, held in self.content.tensors.items()
            if held.origin.name in known and not any(re.fullmatch(rule.parameters, key.name) for rule in rules)
        }

    @cached_property
    def config(self) -> Mapping[str, object]:
        """The saved DeepSpeed JSON, empty where its path was saved instead."""
        return section(self.entries, "ds_config")

    @property
    def version(self) -> str:
        return self.home.model.version if self.home is not None else VERSION

    @cached_property
    def types(self) -> set[ElementType]:
        """Those in which parameters were trained."""
        held = self.content.weights if self.own is None else self.own.checkpoint.model.module
        return {held[name].dtype for name in self.trained if name in held}

    @property
    def wraps_bf16(self) -> bool:
        """Whether the run trained in bf16: by the saved JSON; without it by the names of files and the weights."""
        if isinstance(self.entries.get("ds_config"), dict):
            return section(self.config, "bf16" if "bf16" in self.config else "bfloat16").get("enabled") is True
        named = self.home is not None and self.home.listing.optim_prefix == "bf16_"
        return named or ElementType.BFLOAT16 in self.types

    @property
    def prefix(self) -> str:
        """What DeepSpeed begins names of optimizer files with in a bf16 run (`_get_zero_ckpt_prefix`, engine.py)."""
        if self.home is not None and self.home.optim is not None:
            return self.home.listing.optim_prefix
        return "bf16_" if self.wraps_bf16 else ""

    @property
    def keeps_data_first(self) -> bool:
        """Whether ranks with the same experts are neighbours (`_create_expert_and_data_parallel`, utils/groups.py)."""
        return bool(self.config.get(DATA_FIRST))

    @cached_property
    def scaling(self) -> dict[str, object]:
        """Loss scale and clipping of the saving run; of bf16, where a wrapper saves none, a scale of 1 as it then uses.

        Of another precision DeepSpeed keeps the coming run's where the file has none, and so it does `clip_grad`.
        """
        entries = self.home.optimizer_entries if self.home is not None else {}
        usual = no_scale() if self.types == {ElementType.BFLOAT16} else {}
        return {**usual, **{key: entries[key] for key in _KEPT if key in entries}}

    def file(self, rank: int) -> ModelStates | None:
        """The source's model file of a rank, or else the first rank's; None where none is gone on from."""
        if self.own is None:
            return None
        model = self.own.checkpoint
        return self.own.model_states(rank) if rank < model.dp and rank in model.listing.model else model.model

    @cached_property
    def entries(self) -> Mapping[str, object]:
        """The top level of a model file; steps that no file tells are those of the optimizer.

        Without `global_samples` DeepSpeed counts them from the steps itself (`_load_checkpoint`, engine.py).
        """
        if self.own is not None:
            return self.own.checkpoint.model.entries
        content, home = self.content, self.home.model.entries if self.home is not None else {}
        types = {held.dtype for name, held in content.weights.items() if name in content.trained}
        config: dict[str, object] = {name: {"enabled": True} for dtype, name in _SIXTEEN.items() if dtype in types}
        if content.batch_size is not None:
            config["train_batch_size"] = content.batch_size
        said = home.get("ds_config", config)
        settings = said if isinstance(said, dict) else {}
        if self.data_first not in (None, bool(settings.get(DATA_FIRST))):
            said = {**settings, DATA_FIRST: self.data_first}
        scalars = content.facts.scalars.values() if content.facts is not None else ()
        found = [states["step"] for states in scalars if "step" in states]
        steps = [exact_number(step) if isinstance(step, ScalarTensor) else step for step in found]
        return {
            **dict.fromkeys((*UNSET, "lr_scheduler", "data_sampler", "random_ltd")),
            **({"sparse_tensor_module_names": set()} if not home else {}),  # which loaders before 0.15 want
            "skipped_steps": 0,
            "global_steps": int(
                max((step for step in steps if isinstance(step, int | float) and isfinite(step)), default=0)
            ),
            **content.entries,
            "module": None,
            "buffer_names": sorted(content.buffers),
            "dp_world_size": self.dp,
            "mp_world_size": 1,
            "ds_config": said,
            "ds_version": home.get("ds_version", VERSION),
        }

    def module(self, saved: ModelStates | None) -> OrderedDict[str, object]:
        """The module's entries in their order: of a file that is gone on from with the versions that torch keeps."""
        if saved is not None:
            entries = saved.entries["module"]
            assert isinstance(entries, dict)
            kept = saved.module.keys() | saved.objects.keys()
            module: OrderedDict[str, object] = OrderedDict((n, value) for n, value in entries.items() if n in kept)
            if isinstance(entries, OrderedDict):
                vars(module).update(vars(entries))
            return module
        made = {
            name: new_tensor(f"module/{name}", held.shape, held.dtype) for name, held in self.content.weights.items()
        }
        tied = {name: made[first] for name, first in self.content.tied.items()}
        records = self.content.records
        return OrderedDict({**made, **tied, **{n: records[n] for n in sorted(self.content.buffers & records.keys())}})


def _plain_group(group: GroupFacts) -> GroupFacts:
    """`optimizer_faults` names hyper-parameters that are no number."""
    values = {
        name: exact_number(value) if isinstance(value, ScalarTensor) else value
        for name, value in (group.hyperparameters or {}).items()
    }
    return GroupFacts(members=group.members, hyperparameters=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTarget:
    """The optimizer's files under `kind` ("zero", "bf16" or "zero3") and `stage` at data-parallel size `dp`."""

    saving: Saving
    kind: str
    stage: int
    dp: int
    groups: Sequence[GroupFacts]
    buffers: tuple[FlatBuffer, ...]

    def placements(self) -> Iterator[Placement]:
        for buffer in self.buffers:
            for place in range(self.dp // buffer.ranks):
                yield from self.at_place(buffer, place).placements(OPTIM)

    def at_place(self, buffer: FlatBuffer, place: int) -> FlatBuffer:
        """A flat buffer of experts as the ranks at a place among the expert-parallel ones have it."""
        ep = self.dp // buffer.ranks
        held = experts_held(self.saving.trained, ep) if ep > 1 else {}
        first, step = (place * buffer.ranks, 1) if self.saving.keeps_data_first else (place, ep)
        shapes = dict(zip(of_place(buffer.shapes, held, place), buffer.shapes.values(), strict=True))
        return replace(buffer, shapes=shapes, first=first, step=step)

    def share(self, buffer: FlatBuffer, rank: int) -> int:
        """Which share of a flat buffer a rank has, of those of all ranks with the same parameters."""
        return rank % buffer.ranks if self.saving.keeps_data_first else rank // (self.dp // buffer.ranks)

    def used(self, buffer: FlatBuffer, rank: int) -> int:
        """Elements of one rank's share that belong to parameters, or stand between them."""
        return buffer.used_numel(self.share(buffer, rank))

    def tree(self, rank: int) -> dict[str, object]:
        """What torch.save is given for one rank's file."""
        entries = self._zero3() if self.kind == "zero3" else self._flat(rank)
        config, version = self.saving.entries.get("ds_config"), self.saving.version
        return {"optimizer_state_dict": entries, "ds_config": config, "ds_version": version}

    def data(self) -> dict[str, bytes]:
        """The bytes of the buffers that no logical tensor fills."""
        return {
            _buffer(name, number): value.data
            for number, flat in enumerate(self.buffers)
            for name, value in flat.scalars.items()
            if isinstance(value, ScalarTensor)
        }

    def _base(self) -> dict[str, object]:
        """The wrapped optimizer's own state dict, of padded flat tensors."""
        state: dict[int, dict[str, object]] = {}
        members: dict[int, list[int]] = {}
        for number, flat in enumerate(self.buffers):
            members.setdefault(flat.group, []).append(number)
            held: dict[str, object] = {
                name: _scalar(_buffer(name, number), value) for name, value in flat.scalars.items()
            }
            for kind, dtype in flat.kinds.items():
                if kind != "fp32":
                    held[kind] = new_tensor(f"{kind}/{number}", (flat.partition_numel,), dtype)
            if held:
                state[number] = held
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
        kept = self.saving.scaling
        paddings = [flat.partition_numel - self.used(flat, rank) for flat in self.buffers]
        if self.kind == "bf16":  # the last rank notes all of it (`group_paddings` in bf16_optimizer.py)
            last = [self.share(flat, rank) == flat.ranks - 1 for flat in self.buffers]
            every = [flat.partition_numel * flat.ranks - flat.numel for flat in self.buffers]
            paddings = [numel if of_last else 0 for numel, of_last in zip(every, last, strict=True)]
        entries: dict[str, object] = {
            key: kept[key] for key in _KEPT if key in kept and (self.kind != "bf16" or key == "clip_grad")
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
        """Each parameter's share of the partition, as `fragment_address(numel, start)`."""
        found: OrderedDict[str, object] = OrderedDict()
        for name, cut in flat.cuts():
            piece = cut.piece(self.share(flat, rank), prod(flat.shapes[name]))
            if piece is not None:
                state = {"numel": piece.stop - piece.start, "start": piece.element_offset}
                found[name] = ObjectRecord(callable=_ADDRESS, by_new=True, state=state, has_state=True)
        return found

    def _zero3(self) -> dict[str, object]:
        kept = {**no_scale(), **self.saving.scaling}
        return {
            "zero_stage": ObjectRecord(callable=_STAGE, args=(3,)),
            **{key: kept[key] for key in _KEPT if key in kept},  # stage 3 passes over clip_grad, and keeps its own
            "partition_count": self.dp,
            "optimizer_state_dict": self._base(),
            "fp32_flat_groups": self._masters(0),
        }


def no_scale() -> dict[str, object]:
    """What stage 3 wants where no loss scale was saved (`_rigid_load_state_dict`, runtime/zero/stage3.py, 0.19.8)."""
    scaler = ObjectRecord(callable=_SCALER, by_new=True, state={"cur_scale": 1.0, "dynamic": False}, has_state=True)
    return {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}


def _scalar(buffer: str, value: Scalar) -> object:
    return new_tensor(buffer, value.shape, value.dtype) if isinstance(value, ScalarTensor) else value


def _buffer(name: str, number: int) -> str:
    return f"scalar/{name}/{number}"


def make_buffers(
    saving: Saving,
    groups: Sequence[GroupFacts],
    order: Sequence[Mapping[str, Shape]],
    kind: str,
    dp: int,
    *,
    sub_group_numel: int | None,
) -> tuple[list[FlatBuffer], list[Fault]]:
    """The flat buffers of the target, and what keeps a group from being one; `sub_group_numel` for stage 3."""
    faults: list[Fault] = []
    sizes = [ep_of(group) for group in groups]
    own = [dict(islice(shapes.items(), len(shapes) // ep)) for shapes, ep in zip(order, sizes, strict=True)]
    made = arranged(own, RULES[kind], [dp // ep for ep in sizes], sub_group_numel=sub_group_numel)
    trained, facts = saving.content.trained, saving.content.facts
    for number, buffer in enumerate(made):
        every = order[buffer.group] if sizes[buffer.group] > 1 else buffer.shapes
        kinds = {name: {kind: held.dtype for kind, held in trained.get(name, {}).items()} for name in every}
        scalars = {name: facts.scalars.get(name, {}) if facts is not None else {} for name in every}
        first = next(iter(buffer.shapes))
        for name in every:
            if kinds[name] != kinds[first] or canonical(dict(scalars[name])) != canonical(dict(scalars[first])):
                what = "has other optimizer states than its param group's first parameter"
                what += ": a flat buffer keeps one of each"
                mend = "--to universal, which keeps each parameter's own"
                expected = f"the states and steps of {first}"
                faults.append(UnsupportedLayout.fault(name, what, expected, "others", mend=mend))
        made[number] = replace(buffer, kinds=kinds[first], scalars=scalars[first])
    return made, faults


@dataclass(frozen=True, kw_only=True)  # not slotted: each file of an expert asks for the whole tensors
class ModelTarget:
    """The model's files at a stage and data-parallel size; `order` lists each flat buffer's parameters.

    Of a column of a grid, `shards` are the shapes of what it has a part of, `small` the trained parameters of which it
    has no element, `layers` its files of layers, and `entries` what its files say otherwise than those of one rank.
    """

    saving: Saving
    stage: int
    dp: int
    order: Sequence[Mapping[str, Shape]]
    shards: Mapping[str, Shape] = field(default_factory=dict)
    small: Collection[str] = ()
    layers: Mapping[str, Mapping[str, TensorKey]] | None = None
    entries: Mapping[str, object] = field(default_factory=dict)

    @property
    def files(self) -> int:
        return self.dp if self.stage == 3 else 1

    @cached_property
    def _made(self) -> Mapping[str, TensorRecord]:
        """Each weight under its first name, in a storage of its own."""
        return {
            name: new_tensor(f"module/{name}", self.shards.get(name, held.shape), held.dtype)
            for name, held in self.saving.content.weights.items()
        }

    def placements(self) -> Iterator[Placement]:
        if self.stage == 3:
            for name, (shape, dtype) in self._frozen().items():
                if prod(shape):
                    yield sliced(name, shape, dtype, self.dp, family=MODEL, buffer=f"frozen/{name}")
            return
        made = self._made
        held = [TensorKey(name, WEIGHT) for name in made]
        if self.layers is not None:
            held = list(dict.fromkeys(key for entries in self.layers.values() for key in entries.values()))
        for key in held:
            tensor = made[key.name]
            placed = whole(key.name, WEIGHT, tensor.shape, tensor.dtype, family=MODEL, buffer=_weight(key))
            yield placed._replace(key=key)

    def saved(self, rank: int) -> ModelStates | None:
        """The source's model file that a rank's goes on from, if any is."""
        return self.saving.file(0 if self.entries else rank)

    def tree(self, rank: int, saved: ModelStates | None) -> dict[str, object]:
        """What torch.save is given for one file, which goes on from the source's `saved` if there is such."""
        frozen = self._frozen()
        shapes = OrderedDict((name, SizeRecord(shape)) for name, (shape, _) in frozen.items())
        fragments: OrderedDict[str, object] = OrderedDict()
        module = self._placeholders(saved) if self.stage == 3 else self._whole(saved)
        for name, (shape, dtype) in frozen.items():
            fragments[name] = (
                new_tensor(f"frozen/{name}", (slice_numel(shape, self.dp),), dtype) if self.stage == 3 else module[name]
            )
        # None where the save left frozen parameters out: where DeepSpeed finds some, it wants all (engine.py, 0.19.8).
        keeps_frozen = self.stage >= 2 and bool(frozen)
        changed = {
            "module": module,
            "param_shapes": [
                OrderedDict((name, SizeRecord(shape)) for name, shape in group.items()) for group in self.order
            ],
            "frozen_param_shapes": shapes if keeps_frozen else None,
            "shared_params": dict(self.saving.tied) if rank == 0 else {},
            "frozen_param_fragments": fragments if keeps_frozen else None,
            "dp_world_size": self.dp,
        }
        experts: dict[str, set[int]] = {}
        for layer, number, _ in filter(None, map(expert_of, module)):
            experts.setdefault(layer, set()).add(number)
        entries = {**(saved.entries if saved is not None else self.saving.entries), **self.entries}
        return {**entries, **({"num_experts": [*map(len, experts.values())]} if experts else {}), **changed}

    def apart(self) -> Mapping[str, Mapping[str, TensorKey]]:
        """The files of layers or experts (`_get_expert_ckpt_name`, engine.py) with their weights by the names there."""
        layers: dict[str, int] = {}
        files: dict[str, dict[str, TensorKey]] = {}
        for name in self._made if self.stage < 3 else ():
            if (of := expert_of(name)) is not None:
                layer = layers.setdefault(of[0], len(layers))
                file = f"layer_{layer}_expert_{of[1]}_mp_rank_00_model_states.pt"
                files.setdefault(file, {})[name] = TensorKey(name, WEIGHT)
        return files or self.layers or {}

    def part(self, entries: Mapping[str, TensorKey]) -> dict[str, object]:
        """What torch.save is given for the file of a layer or an expert."""
        made = self._made
        return {
            entry: new_tensor(_weight(key), made[key.name].shape, made[key.name].dtype)
            for entry, key in entries.items()
        }

    def _frozen(self) -> dict[str, tuple[Shape, ElementType]]:
        """Parameters that this column's optimizer does not own: DeepSpeed takes one without elements for such."""
        own = {name: (self.shards.get(name, shape), dtype) for name, (shape, dtype) in self.saving.frozen.items()}
        return {**own, **{name: (self.shards[name], self._made[name].dtype) for name in self.small}}

    def _whole(self, saved: ModelStates | None) -> OrderedDict[str, object]:
        made, tied = self._made, self.saving.content.tied
        module = self.saving.module(saved)
        for name in module:
            module[name] = made.get(tied.get(name, name), module[name])
        return module

    def _placeholders(self, saved: ModelStates | None) -> OrderedDict[str, object]:
        """Parameters as stage 3 saves them, of no element; tied weights share theirs."""
        shared, buffers = self.saving.tied, self.saving.content.buffers
        module = self.saving.module(saved)
        empty: dict[str, TensorRecord] = {}
        for name, value in module.items():
            if name not in buffers and isinstance(value, TensorRecord):
                first = shared.get(name, name)
                module[name] = empty.setdefault(first, new_tensor(f"empty/{first}", (0,), value.dtype))
        return module


def _weight(key: TensorKey) -> str:
    """The buffer of a weight, or of a copy of it in another file."""
    return f"module/{key.name}" if not key.copy else f"module/{key.name}/{key.copy}"
