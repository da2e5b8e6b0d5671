"""A nanotron checkpoint that is to be written, for stock nanotron's own loader at exactly that topology.

The files and their entries are those of `save_weights`, `save_optimizer`, `save_lr_scheduler` and `save_meta` at
commit 2411b02. `load_optimizer` takes the file of its own rank as it is where tp and pp are those of
optimizer_config.json, and by the numbers in it, not the names: the order of parameters is that of the module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_reshard.containers import folders
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.nanotron.checkpoint import OPTIM, NanotronCheckpoint, shape_of, state_cut
from ds_reshard.formats.nanotron.content import content_of, digest_of, unlike
from ds_reshard.formats.nanotron.metadata import ACCUMULATING, PLAIN, ZERO, resized, rewritten
from ds_reshard.formats.nanotron.names import (
    CONFIG,
    LATEST,
    META,
    MODEL_CONFIG,
    OPTIMIZER_CONFIG,
    Rank,
    Topology,
    state_name,
    weight_name,
)
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.formats.nanotron.parameters import DATA, Parameter, SlicesPair, place, split_of, tiles_of
from ds_reshard.model.content import Schedule
from ds_reshard.model.facts import GroupFacts, Scalar, ScalarTensor
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType, new_tensor
from ds_reshard.model.target import ConversionRequest, Target, TargetFile, Unit

_LIKE = "name a checkpoint that a run of that topology has saved: --like DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one pipeline rank trains, in the order of its module: param groups, and what its scheduler keeps of each."""

    groups: tuple[tuple[GroupFacts, Mapping[str, object]], ...]

    @property
    def names(self) -> list[str]:
        return [name for group, _ in self.groups for name in group.members]


def _arranged(source: NanotronCheckpoint, asked: ConversionRequest, like: NanotronCheckpoint | None) -> _Writing:
    """Raises UnsupportedLayout, with every reason, where the source does not tell how the target is arranged."""
    subject = f"converting {source.folder} to nanotron"
    topology, dp = _topology(source, asked, like)
    faults = list(_lacking(source)) + (list(_unlike(source, like, topology)) if like is not None else [])
    raise_faults(faults, subject=subject)
    stages = _like_stages(source, like) if like is not None else _stages(source, topology.pp)
    parameters: dict[str, Parameter] = {}
    for name, parameter in source.parameters.items():
        try:
            parameters[name] = _cut(parameter, like.parameters[name] if like is not None else None, topology.tp)
        except ValueError as error:
            mend = _LIKE if split_of(parameter.pairs, parameter.shape) is None else "another --tp"
            faults.append(_unsupported(name, str(error), f"tp {topology.tp}", mend))
    if stages is None:
        found = f"pp {source.topology.pp}, and pp {topology.pp} is asked for"
        what = "which stage of another pipeline trains what, no file says"
        faults.append(_unsupported(source.folder, what, found, _LIKE))
    raise_faults(faults, subject=subject)
    assert stages is not None
    homes = _homes(source if like is None else like, stages, topology.pp)
    return _Writing(source=source, topology=topology, dp=dp, stages=stages, parameters=parameters, homes=homes)


def _topology(
    source: NanotronCheckpoint, asked: ConversionRequest, like: NanotronCheckpoint | None
) -> tuple[Topology, int]:
    default = like if like is not None else source
    cut = default.topology.dp is not None if asked.zero_stage is None else asked.zero_stage > 0
    dp = asked.dp or default.metadata.dp
    pp, tp = asked.pp or default.topology.pp, asked.tp or default.topology.tp
    return Topology(pp=pp, tp=tp, dp=dp if cut else None, exp=1), dp


def _lacking(source: NanotronCheckpoint) -> Iterator[Fault]:
    if not source.stages:
        yield _unsupported(source.folder, "holds no optimizer", "none", "load its weights with nanotron as they are")
    for stage in source.stages:
        if stage.stateless:
            what = "has parameters in its param groups that have no state, and so no name: they were frozen"
            mend = "save it with zero_stage 1, which leaves frozen parameters out of the groups"
            yield _unsupported(stage.path, what, f"{stage.stateless} of them", mend)


def _unlike(source: NanotronCheckpoint, like: NanotronCheckpoint, topology: Topology) -> Iterator[Fault]:
    """In what the checkpoint that shows the arrangement is of another model, or of another topology than asked for."""
    if (like.topology.pp, like.topology.tp) != (topology.pp, topology.tp):
        found = f"pp {like.topology.pp}, tp {like.topology.tp}"
        yield _unsupported(like.folder, "is of another topology than asked for", found, "leave out --pp and --tp")
    yield from unlike(content_of(source), like, as_it_is=True)
    for name in sorted(set(source.parameters) & set(like.parameters)):
        if source.parameters[name].sharded != like.parameters[name].sharded:
            what = "is cut over tensor-parallel ranks in the source or in --like alone"
            yield _unsupported(name, what, f"--like {like.folder}", _LIKE)


def _unsupported(where: str, what: str, found: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, found=found, mend=mend)


def _saved(source: NanotronCheckpoint) -> Iterator[Stage]:
    for pp, stage in enumerate(source.stages):
        rows = source.schedulers[pp].groups if source.schedulers else ({},) * len(stage.groups)
        yield Stage(groups=tuple(zip(stage.groups, rows, strict=True)))


def _stages(source: NanotronCheckpoint, pp: int) -> tuple[Stage, ...] | None:
    """The stages as they were saved, or joined into one: nanotron gives its blocks to the stages in their order.

    (`build_model` in models/base.py.) A tied parameter is then trained where its first stage had it.
    """
    if pp == source.topology.pp:
        return tuple(_saved(source))
    pairs = [pair for stage in _saved(source) for pair in stage.groups]
    if pp != 1 or any(len(group.members) > 1 for group, _ in pairs):
        return None
    seen: set[str] = set()
    kept = []
    for group, row in pairs:
        if not seen.intersection(group.members):
            kept.append((group, row))
            seen.update(group.members)
    return (Stage(groups=tuple(kept)),)


def _like_stages(source: NanotronCheckpoint, like: NanotronCheckpoint) -> tuple[Stage, ...] | None:
    """The groups of `like`, each with the hyper-parameters that the source has of its members."""
    pairs = [pair for stage in _saved(source) for pair in stage.groups]
    homes = {name: pair for pair in reversed(pairs) for name in pair[0].members}
    empty = next((pair for pair in pairs if not pair[0].members), None)
    stages = []
    for stage in like.stages:
        groups = []
        for group in stage.groups:
            found = {id(homes[name]): homes[name] for name in group.members} or ({0: empty} if empty else {})
            if len(found) != 1:
                return None
            saved, row = next(iter(found.values()))
            groups.append((replace(saved, members=group.members), row))
        stages.append(Stage(groups=tuple(groups)))
    return tuple(stages)


def _cut(parameter: Parameter, like: Parameter | None, tp: int) -> Parameter:
    """The parameter's shards at a tensor-parallel size; ValueError where no file says how it is cut."""
    pairs: Sequence[tuple[SlicesPair, ...]]
    if not parameter.sharded:
        pairs, shapes = (), {0: parameter.shape}
    elif like is not None:
        pairs, shapes = like.pairs, {rank: tensor.shape for rank, tensor in like.files.items()}
    elif tp == len(parameter.files):
        pairs, shapes = parameter.pairs, {rank: tensor.shape for rank, tensor in parameter.files.items()}
    else:
        split = split_of(parameter.pairs, parameter.shape)
        if split is None:
            raise ValueError("is cut by another rule than nanotron's equal parts of chunks")
        pairs = tuple(split.pairs(len(parameter.shape), rank, tp) for rank in range(tp))
        shapes = dict.fromkeys(range(tp), split.local_shape(parameter.shape, tp))
    buffer = f"weight/{parameter.name}"
    return Parameter(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        pairs=tuple(pairs),
        files={rank: new_tensor(buffer, shape, parameter.dtype) for rank, shape in shapes.items()},
        tiles=tuple(tuple(tiles_of(of, shapes[rank], parameter.shape)) for rank, of in enumerate(pairs)),
    )


def _homes(shown: NanotronCheckpoint, stages: Sequence[Stage], pp: int) -> dict[str, int]:
    """The pipeline rank that writes each weight: the first that trains it; of a frozen one, that which wrote it."""
    homes = {name: number for number, stage in reversed(list(enumerate(stages))) for name in stage.names}
    for name in shown.parameters:
        homes.setdefault(name, shown.listing.weight_stages.get(name, 0) if pp > 1 else 0)
    return homes


def kinds_of(source: NanotronCheckpoint, name: str) -> dict[str, ElementType]:
    """The states of a parameter with their types, in the order of the source's file."""
    stage = source.stages[source.stages_of(name)[0]]
    return {kind: tensor.dtype for kind, tensor in stage.states[name].items()}


WEIGHTS, TEXTS = "weights", "texts"


def nanotron_target(
    source: NanotronCheckpoint, asked: ConversionRequest, like: NanotronCheckpoint | None = None
) -> Target:
    """The files of the same state at the topology that is asked for, or that `like` has.

    Raises UnsupportedLayout, with every reason, where the source does not tell how they are arranged.
    """
    writing = _arranged(source, asked, like)
    raise_faults(writing.idle(), subject=f"converting {source.folder} to nanotron")
    placements = {placement.key: placement for placement in writing.placements()}
    shards = {WEIGHTS: writing.topology.tp, OPTIM: len(list(writing.topology.ranks)), TEXTS: 1}
    tag = source.listing.tag
    return Target(
        layout=Layout(placements, shards),
        folder=tag,
        pointers={LATEST: tag},
        units=tuple(writing.units()),
        sources={key: TensorKey(name=key.name, kind=key.kind) for key in placements},
        notes=tuple(writing.notes()),
        basis={"like": digest_of(like)} if like is not None else {},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """The target's topology, its stages, how each parameter is cut there, and the stage that writes its weight."""

    source: NanotronCheckpoint
    topology: Topology
    dp: int
    stages: tuple[Stage, ...]
    parameters: Mapping[str, Parameter]
    homes: Mapping[str, int]

    def idle(self) -> Iterator[Fault]:
        """Ranks that would have no part of any parameter.

        `NamedOptimizer.load_state_dict` refuses that: "Loading empty state dict".
        """
        for rank in self.topology.ranks:
            if all(self._shape(name, rank) is None for name in self.stages[rank.pp].names):
                yield UnsupportedLayout.fault(
                    state_name("optimizer", self.topology, rank),
                    "would hold nothing: no parameter there has as many elements as there are data-parallel ranks, and "
                    "nanotron loads no empty state",
                    found=f"dp {self.topology.dp}",
                    mend="a smaller --dp, or --zero-stage 0",
                )

    def placements(self) -> Iterator[Placement]:
        for parameter in self.parameters.values():
            cuts = {tp: Cut(chunk=max(1, parameter.local_numel(tp)), first=tp) for tp in parameter.files}
            yield place(parameter, "weight", parameter.dtype, WEIGHTS, f"weight/{parameter.name}", cuts)
        copies: dict[TensorKey, int] = {}
        for pp, stage in enumerate(self.stages):
            for name in stage.names:
                yield from self._states(pp, name, copies)

    def _states(self, pp: int, name: str, copies: dict[TensorKey, int]) -> Iterator[Placement]:
        """The states in one stage: one copy of a parameter that is cut over the tensor ranks, else one on each."""
        parameter = self.parameters[name]
        cuts = {tp: self._cut(parameter, Rank(pp=pp, tp=tp, dp=0)) for tp in range(self.topology.tp)}
        for kind, dtype in kinds_of(self.source, name).items():
            for part in [cuts] if parameter.sharded else [{tp: cut} for tp, cut in cuts.items()]:
                key = TensorKey(name=name, kind=kind)
                copy = copies[key] = copies.get(key, -1) + 1
                yield place(parameter, kind, dtype, OPTIM, f"{kind}/{name}", part, copy=copy)

    def _cut(self, parameter: Parameter, rank: Rank) -> Cut:
        return state_cut(parameter.local_numel(rank.tp), self.topology, rank)

    def units(self) -> Iterator[Unit]:
        topology = self.topology
        yield Unit(family=TEXTS, shard=0, files=tuple(self._texts()))
        for tp in range(topology.tp):
            yield Unit(family=WEIGHTS, shard=tp, files=tuple(self._weights(tp)))
        for rank in topology.ranks:
            files = [self._optimizer(rank)]
            if self.source.schedulers and not rank.dp:
                files.append(self._scheduler(rank))
            yield Unit(family=OPTIM, shard=topology.shard(rank), files=tuple(files))

    def _weights(self, tp: int) -> Iterator[TargetFile]:
        for name, parameter in self.parameters.items():
            if tp not in parameter.files:
                continue
            said: dict[str, str] = {}
            shard = None
            if parameter.sharded:
                shard = (self.homes[name], self.topology.pp, tp, self.topology.tp)
                said = {
                    "version": self.source.metadata.version,
                    "unsharded_shape": str(parameter.shape),
                    "local_global_slices_pairs": ";".join(map(str, parameter.pairs[tp])),
                }
            tree: dict[str, object] = {DATA: parameter.files[tp]}
            yield TargetFile(
                name=weight_name(name, shard), tree=partial(dict, tree), container="safetensors", metadata=said
            )

    def _optimizer(self, rank: Rank) -> TargetFile:
        held = {name: self._shape(name, rank) for name in self.stages[rank.pp].names}
        data = {
            f"{kind}/{name}": value.data
            for name, shape in held.items()
            if shape is not None
            for kind, value in self._scalars(name).items()
            if isinstance(value, ScalarTensor)
        }
        name = state_name("optimizer", self.topology, rank)
        return TargetFile(name=name, tree=partial(self._optimizer_tree, rank), data=data)

    def _shape(self, name: str, rank: Rank) -> tuple[int, ...] | None:
        return shape_of(self.parameters[name], self.topology, rank)

    def _scalars(self, name: str) -> Mapping[str, Scalar]:
        assert self.source.facts is not None
        return self.source.facts.scalars.get(name, {})

    def _optimizer_tree(self, rank: Rank) -> dict[str, object]:
        """What torch.save is given for one rank's file: numbers count the parameters that it has a part of."""
        names: dict[int, str] = {}
        state: dict[int, dict[str, object]] = {}
        groups: list[dict[str, object]] = []
        masters: dict[str, object] = {}
        for group, _ in self.stages[rank.pp].groups:
            members = []
            for name in group.members:
                shape = self._shape(name, rank)
                if shape is None:
                    continue
                number = len(names)
                names[number] = name
                members.append(number)
                state[number] = {
                    kind: new_tensor(f"{kind}/{name}", value.shape, value.dtype)
                    if isinstance(value, ScalarTensor)
                    else value
                    for kind, value in self._scalars(name).items()
                }
                for kind, dtype in kinds_of(self.source, name).items():
                    holder, key = (masters, name) if kind == MASTER else (state[number], kind)
                    holder[key] = new_tensor(f"{kind}/{name}", shape, dtype)
            groups.append({**(group.hyperparameters or {}), "params": members})
        made: dict[str, object] = {"state": state, "param_groups": groups, "names": names}
        return {**made, "gradient_accumulator": masters} if self._has_masters else made

    @property
    def _has_masters(self) -> bool:
        return any(stage.has_masters for stage in self.source.stages)

    def _scheduler(self, rank: Rank) -> TargetFile:
        """One for all data-parallel ranks, under ZeRO-1 too.

        The trainer asks for it with the stage's number as `is_zero`, which is not `True` (`lr_scheduler_filename`).
        """
        kept = tuple(row for _, row in self.stages[rank.pp].groups)
        schedule = Schedule(counters=self.source.schedulers[0].counters, groups=kept)
        name = state_name("lr_scheduler", replace(self.topology, dp=None), rank)
        return TargetFile(name=name, tree=schedule.entries)

    def _texts(self) -> Iterator[TargetFile]:
        topology, listing = self.topology, self.source.listing
        meta = {**self.source.metadata.entries, "tp": topology.tp, "dp": self.dp}
        yield _text(META, json.dumps(meta, indent=2, sort_keys=True))
        yield _text(OPTIMIZER_CONFIG, json.dumps(self._optimizer_config()))
        if CONFIG in listing.nbytes:
            yield _text(CONFIG, rewritten(folders.read_text(listing.path(CONFIG)), self._config()))
        kept = [MODEL_CONFIG, *(self._random if self._keeps_random else ())]
        for name in kept:
            if name in listing.nbytes:
                yield TargetFile(name=name, tree=partial(folders.read_small, listing.path(name)), container="plain")

    def _optimizer_config(self) -> dict[str, object]:
        """Return the optimizer's config: its type, the parallel sizes and, under ZeRO, where each rank's shards begin.

        As in nanotron, shards are those of world rank 0's pipeline stage, and every number is a string.
        """
        topology = self.topology
        sizes = {
            "tp_size": topology.tp,
            "dp_size": self.dp,
            "pp_size": topology.pp,
            "expert_parallel_size": topology.exp,
        }
        configs: dict[str, object] = {}
        if topology.dp is not None:
            offsets, shapes, first = {}, {}, Rank(pp=0, tp=0, dp=0)
            for name in self.stages[0].names:
                parameter = self.parameters[name]
                pieces = self._cut(parameter, first).pieces(0, parameter.local_numel(0))
                offsets[name] = {str(piece.shard): [str(piece.start), str(piece.stop)] for piece in pieces}
                shapes[name] = [str(size) for size in parameter.local_shape(0)]
            configs = {"param_name_to_dp_rank_offsets": offsets, "orig_param_shapes": shapes}
        whole = ACCUMULATING if self._has_masters else PLAIN
        return {
            "type": ZERO if topology.dp is not None else whole,
            "parallelism": {key: str(size) for key, size in sizes.items()},
            "configs": configs,
        }

    def _config(self) -> dict[str, int]:
        return {
            "parallelism.dp": self.dp,
            "parallelism.tp": self.topology.tp,
            "parallelism.pp": self.topology.pp,
            "optimizer.zero_stage": int(self.topology.dp is not None),
            **self._batch[0],
        }

    @property
    def _batch(self) -> tuple[dict[str, int], str | None]:
        return resized(self.source.metadata.batch, self.dp)

    @property
    def _random(self) -> list[str]:
        return [name for name in self.source.listing.nbytes if name.startswith("random/")]

    @property
    def _keeps_random(self) -> bool:
        """Whether each rank of the target is one of the source: the optimizer's files may be cut otherwise."""
        saved = self.source.topology
        return (saved.pp, saved.tp, self.source.metadata.dp) == (self.topology.pp, self.topology.tp, self.dp)

    def notes(self) -> Iterator[str]:
        """What the user should know of the output."""
        told = self._batch[1]
        if told is not None and self.dp != self.source.metadata.dp:
            yield told
        if self._random and not self._keeps_random:
            yield (
                "random states are left out: each is one rank's own, and other ranks draw other numbers from them; the "
                "coming run seeds its own"
            )


def _text(name: str, text: str) -> TargetFile:
    return TargetFile(name=name, tree=partial(text.encode, "utf-8"), container="plain")
