"""A `torch_dist` checkpoint that is to be written, for stock Megatron-LM under any tp, pp and dp.

Its optimizer state is of sharding type `fully_reshardable`, under the keys of the model; what all ranks share lies in
common.pt, which every release from 0.14 to 0.19 reads (core/dist_checkpointing/serialization.py,
`load_common_state_dict`, 0.19.2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_reshard.containers.dcp_directory import BACKEND, COMMON, Entry, PlacedArchive
from ds_reshard.containers.dcp_files import DirectoryFiles
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.checkpoint import TRACKER, Chain, Group, arguments_of, iteration_name
from ds_reshard.formats.megatron.optimizer import EXPERTS, odd_states
from ds_reshard.formats.megatron.shifts import Shifts
from ds_reshard.model.content import MASTER, WEIGHT, Content, Path, TensorSource
from ds_reshard.model.facts import GroupFacts, canonical, number_of
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile

_SHARDING = "fully_reshardable"
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.(.+)")
_CONTENT = {
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""`_build_sharded_state_dict_metadata`, megatron/training/checkpointing.py, 0.18.2 and 0.19.2."""
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a checkpoint of Megatron-LM has beside its tensors: what all ranks share, lists of objects by their keys.

    `chain` has the param groups of each optimizer; None where there is none. `stacked`: whether layers are one tensor.
    """

    common: Mapping[object, object]
    objects: Mapping[str, Sequence[object]]
    chain: Chain | None
    stacked: bool


def stacks(arguments: Mapping[str, object]) -> bool:
    """Whether layers are saved stacked (core/transformer/transformer_block.py, `sharded_state_dict`, 0.19.2)."""
    several = any(
        isinstance(value, list | tuple) or (isinstance(value, int) and value > 1)
        for value in (arguments.get(name) for name in ("moe_layer_freq", "linear_attention_freq"))
    )
    uneven = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "hybrid_layer_pattern")
    return not several and not any(arguments.get(name) for name in uneven)


def megatron_target(content: Content, shown: Shown, files: int, ep: int | None, shifts: Shifts | None = None) -> Target:
    """The folder, with its tensors cut by rows over so many files; what `shifts` have lost of moments is zero."""
    chain = chained(shown.chain, ep, content)
    writing = _Writing(
        content=content, shown=shown, files=files, chain=chain, step=step_of(content), shifts=shifts or Shifts()
    )
    tag = iteration_name(str(shown.common.get("iteration", content.steps)))
    return Target(
        layout=Layout(writing.placements, writing.shards),
        sources=writing.wants,
        units=list(writing.units()),
        folder=tag,
        pointers={TRACKER: str(shown.common.get("iteration", content.steps))},
        notes=tuple(shifts.notes()) if shifts is not None else (),
    )


def target_faults(content: Content, shown: Shown) -> Iterator[Fault]:
    """What Megatron-LM could not load, or would not go on from as it was."""
    arguments = arguments_of(shown.common.get("args"))
    if arguments.get("fp16"):
        yield _fault(content.folder, "the state of the fp16 loss scaler is not carried over", "convert a bf16 run")
    for name in odd_states(arguments):
        yield _fault(
            content.folder, f"with {name} it would be saved under other keys", "--to safetensors, for the weights"
        )
    for name, kinds in content.trained.items():
        master = kinds.get(MASTER)
        if master is None or master.dtype is not ElementType.FLOAT32:
            yield _fault(name, "is trained without an fp32 master", "save it with fp32 masters")
    numbers = {number_of(told.get("step")) for told in content.facts.scalars.values()} if content.facts else set()
    if len(numbers) > 1:
        yield _fault(content.folder, f"its parameters are at several steps: {sorted(map(str, numbers))}", "another tag")
    if numbers <= {None} and content.steps and any("exp_avg_sq" in kinds for kinds in content.trained.values()):
        yield _fault(
            content.folder, "Adam's moments are there, and not their step", "--to safetensors, for the weights"
        )


@dataclass(frozen=True, kw_only=True)
class _Writing(DirectoryFiles):
    content: Content
    shown: Shown
    chain: Sequence[Sequence[Group]]
    step: object
    shifts: Shifts

    @property
    def lost(self) -> dict[TensorKey, list[Box]]:
        """What is zero of states that are no masters."""
        return {key: boxes for key, boxes in self.shifts.lost.items() if key.kind != MASTER}

    @cached_property
    def placements(self) -> dict[TensorKey, Placement]:
        """Of a state of which something is lost each box that is in a file, by itself."""
        made, lost = super().placements, self.lost
        whole = {key: placement for key, placement in made.items() if key not in lost}
        for key in lost:
            for number, box in enumerate(self.shifts.kept.get(key, ()), 1):
                placed, copy, cut = made[key], key._replace(copy=number), Cut(chunk=box.numel)
                whole[copy] = Placement(copy, placed.shape, placed.dtype, self.family, f"{key}{number}", cut, box)
        return whole

    def chunks(self, rank: int) -> Iterator[tuple[TensorKey, Box, str]]:
        yield from super().chunks(rank)
        yield from self._zeros() if not rank else ()

    def _zeros(self) -> Iterator[tuple[TensorKey, Box, str]]:
        for key, boxes in self.lost.items():
            yield from ((key, box, f"{key} zeros {number}") for number, box in enumerate(boxes))

    @property
    def data(self) -> Mapping[str, bytes]:
        return {buffer: bytes(box.numel * self.held[key].dtype.itemsize) for key, box, buffer in self._zeros()}

    @cached_property
    def held(self) -> Mapping[TensorKey, TensorSource]:
        return self.content.tensors

    @cached_property
    def objects(self) -> Mapping[Path, object]:
        return {(key,): value for key, value in self.shown.objects.items()}

    @cached_property
    def layers(self) -> dict[str, int]:
        """How many layers have a tensor, by its name without the layer's number."""
        counts: dict[str, int] = {}
        for name in {key.name for key in self.held}:
            match = _LAYER.fullmatch(name)
            if match is not None:
                counts[match[1] + match[3]] = counts.get(match[1] + match[3], 0) + 1
        return counts

    def _placed(self, name: str) -> tuple[str, int | None]:
        """The key of a parameter, and its layer where that is one of a stack."""
        match = _LAYER.fullmatch(name) if self.shown.stacked else None
        return (match[1] + match[3], int(match[2])) if match is not None else (name, None)

    def told(self, key: TensorKey, box: Box) -> Box:
        layer = self._placed(key.name)[1]
        return box if layer is None else Box(offset=(layer, *box.offset), size=(1, *box.size))

    def tensor_entries(self, key: TensorKey, archives: tuple[PlacedArchive, ...]) -> Iterator[Entry]:
        held, (name, layer) = self.held[key], self._placed(key.name)
        shape = held.shape if layer is None else (self.layers[name], *held.shape)
        path = name if key.kind == WEIGHT else f"optimizer.state.{_SAVED.get(key.kind, key.kind)}.{name}"
        yield Entry(path=(path,), archives=archives, shape=shape, dtype=held.dtype)

    def object_entries(self, path: Path, archive: PlacedArchive) -> Iterator[Entry]:
        yield Entry(path=path, archives=(archive,))

    def beside(self) -> tuple[TargetFile, ...]:
        text = json.dumps(_BACKEND).encode("utf-8")
        return (
            TargetFile(name=COMMON, tree=self.common),
            TargetFile(name=BACKEND, tree=lambda: text, container="plain"),
        )

    def common(self) -> object:
        """What all ranks share."""
        told = self.shown.common.get("content_metadata")
        kept = told if isinstance(told, dict) else {}
        made = dict(self.shown.common)
        made["content_metadata"] = {**_CONTENT, **kept, "distrib_optim_sharding_type": _SHARDING}
        states = [
            {
                "optimizer": {"param_groups": [group_with(group, self.step) for group in groups]},
                "param_state_sharding_type": _SHARDING,
            }
            for groups in self.chain
        ]
        if states:
            made["optimizer"] = states[0] if len(states) == 1 else dict(enumerate(states))
        return made


def group_with(group: Group, step: object) -> Group:
    """A param group as a distributed optimizer saves it; at `step` where it does not tell its own."""
    told = {"step": step} if step is not None else {}
    return told | {name: value for name, value in group.items() if name != "params"}


def step_of(content: Content) -> object:
    """The step of all parameters; None where no file tells one."""
    told = content.facts.scalars.values() if content.facts is not None else ()
    steps = {number_of(states["step"]) for states in told if "step" in states}
    step = steps.pop() if len(steps) == 1 else None
    return int(step) if step is not None else None  # which fused optimizers count on from, in whole numbers


_SAVED = {MASTER: "param"}


def chained(chain: Chain | None, ep: int | None, content: Content) -> Sequence[Sequence[Group]]:
    """The groups of each optimizer of the coming run: experts of an expert-parallel run have one of their own.

    Its groups are those of dense parameters once more (`get_megatron_optimizer`, core/optimizer/__init__.py, 0.19.2).
    """
    groups = [group for one in chain or () for group in one]
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    apart = [{**group, "is_expert_parallel": False} for group in groups if group.get("is_expert_parallel")]
    facts: Sequence[GroupFacts] = content.facts.groups if content.facts is not None else ()
    of_experts = [
        {**group, "is_expert_parallel": True}
        for group, told in zip(groups, facts, strict=False)
        if any(EXPERTS in f".{name}" for name in told.members)
    ]
    if ep is None or (ep > 1) == bool(apart) or not of_experts:
        return chain or ()
    known = set(map(canonical, dense))
    if ep == 1 and any(canonical(group) not in known for group in apart):
        what = "a param group of experts has other values than those of dense parameters, and would be joined with one"
        raise_faults([_fault(content.folder, what, "leave out --ep 1")], subject=f"converting {content.folder}")
    return [dense, of_experts] if ep > 1 else [dense]


def _fault(where: str, what: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, mend=mend)
