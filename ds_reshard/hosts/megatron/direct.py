"""A load straight from the files: each rank reads what it owns.

Megatron's own `load_checkpoint` still runs, for all that is not a tensor: it compares arguments, sets iteration,
samples and schedule, through the seams that every load has. It is told that model and optimizer are not to be loaded
(`skip_load_to_model_and_opt`), and given what the checkpoint says beside its tensors as if it had read that itself.
Before that every rank has opened the files and planned its reads (`load`); afterwards weights, masters and states are
filled in place. Seams that were seen to work in 0.18.2 and 0.19.2: training/checkpointing.py `load_checkpoint`,
`check_checkpoint_args`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import SimpleNamespace
from typing import cast

from ds_reshard.containers.revive import revive
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.execution.buffers import element_type, read_tensor
from ds_reshard.formats.megatron.checkpoint import chain_of, read_object
from ds_reshard.formats.megatron.door import OpenedMegatron
from ds_reshard.formats.megatron.flat_states import size_of
from ds_reshard.formats.megatron.torch_format import TorchFormat
from ds_reshard.hosts.megatron.group_values import note_loaded
from ds_reshard.hosts.megatron.groups import plain_groups, states_of
from ds_reshard.hosts.megatron.live import Group, Load, leaves
from ds_reshard.hosts.megatron.pieces import (
    Piece,
    Share,
    allocate,
    is_distributed,
    is_mixed,
    kinds_of,
    pieces_of,
    shares_of,
    unsupported,
)
from ds_reshard.hosts.megatron.topology import Saved
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import MASTER, STEPS, WEIGHT
from ds_reshard.model.facts import ScalarTensor, number_of
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Region, Shape
from ds_reshard.operations.filling import fill
from ds_reshard.operations.matching import TENSORS, choose_source, match_tensors
from ds_reshard.operations.ranks import attempt
from ds_reshard.operations.wrapper_names import patterns
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Fill, Plan, copies_of
from ds_reshard.resume.policy import ResumePolicy

Runs = tuple[Mapping[str, object], Mapping[str, object]]
MODEL = "build the model that was saved: compare the arguments of both runs"
STATES = "train the parameters that the saving run has trained, or add --no-load-optim"
_EACH = "data_parallel_random_init"
_TP, _PP, _EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))


@dataclass(slots=True, kw_only=True)
class Reads:
    """What fills this rank's tensors, by the names of buffers."""

    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def plan(self) -> Plan:
        return Plan(copies=coalesce(self.copies), fills=tuple(self.fills))

    def read(
        self,
        source: Checkpoint,
        key: TensorKey,
        piece: Piece,
        elements: tuple[int, int],
        buffer: str,
        dtype: ElementType,
    ) -> None:
        """Read elements of a live tensor; rows that pad the vocabulary in this run alone are zero, as in Megatron."""
        rows = source.layout[key].shape[:1]
        for region, first in piece.regions(*elements):
            stop = region.stop
            if piece.padded and rows:
                each = prod(region.box.size[1:])
                stop = min(stop, max(region.start, (rows[0] - region.box.offset[0]) * each))
            if stop < region.stop:
                self.fills.append(Fill(buffer, first + stop - region.start, region.stop - stop))
            if region.start < stop:
                wanted = Region(box=region.box, start=region.start, stop=stop)
                self.copies += copies_of(source.index, key, wanted, buffer=buffer, element_offset=first, dtype=dtype)


@dataclass(slots=True, kw_only=True)
class Taken:
    """A load that is not left to Megatron: what was opened, and what this rank reads of it.

    A run that is still to come has no tensors. `shares` are None where the optimizer's state is not loaded; `kinds` are
    those that are read of each parameter. `same_grid` is whether this rank is one of the saved grid, `random` has its
    random states as Megatron takes them, None if there are none.
    """

    saved: Saved
    source: Checkpoint
    same_grid: bool
    random: object = None
    optimizer: object | None = None
    pieces: list[Piece] = field(default_factory=list)
    shares: list[Share] | None = None
    kinds: tuple[str, ...] = ()
    weights: Reads = field(default_factory=Reads)
    states: Reads = field(default_factory=Reads)

    def answer(self) -> tuple[object, str, bool, object]:
        """What `_load_base_checkpoint` returns for such a load: all but the tensors, as plain values."""
        from megatron.training import checkpointing

        common = self.saved.common
        if hasattr(checkpointing, "set_loaded_iteration"):
            checkpointing.set_loaded_iteration(common.get("iteration"))
        kept = ("iteration", "checkpoint_version", "opt_param_scheduler", "lr_scheduler", "total_iters")
        state = {name: common[name] for name in (*kept, "num_floating_point_operations_so_far") if name in common}
        states, unread, _ = attempt(lambda: states_of(self.optimizer, self.groups()))
        raise_faults(unread if self.shares is not None else [], subject=f"loading {self.saved.folder}")
        state |= {"args": SimpleNamespace(**self.saved.arguments)}
        state |= {"rng_state": self.random} if self.random is not None else {}
        state |= {"optimizer": states or {}}
        return state, self.saved.folder, False, checkpointing.CheckpointType.LEGACY

    def groups(self) -> list[Group]:
        """The saved param groups; a step that only some of them have is that of all."""
        groups = plain_groups(chain_of(self.saved.common.get("optimizer"), self.saved.objects) or ())
        scalars = self.source.facts.scalars if self.source.facts is not None else {}
        told = [one.get("step") for one in (*groups, *scalars.values())]
        steps = {number_of(one) for one in told if isinstance(one, ScalarTensor | int | float)}
        step = steps.pop() if len(steps) == 1 else None
        return [{**group, "step": int(step)} for group in groups] if step is not None else groups

    @property
    def draws_anew(self) -> bool:
        """Whether there are no random states for this rank, which of format `torch` is said to be a lack."""
        return self.random is None and (self.saved.whole or not self.same_grid)

    def load(self, original: Callable[..., tuple[int, object]], arguments: Namespace) -> tuple[int, object]:
        """Megatron's own load without its tensors, then the tensors. Collective."""
        told = {"ckpt_format": "torch", "use_dist_ckpt": True, "use_distributed_optimizer": False}
        told |= {"no_load_rng": True} if self.draws_anew else {}
        held = {name: getattr(arguments, name) for name in told}
        vars(arguments).update(told)
        try:
            result = original(skip_load_to_model_and_opt=True)
        finally:
            vars(arguments).update(held)
        self._fill()
        return result

    def _fill(self) -> None:
        from megatron.core import parallel_state

        subject = f"filling from {self.saved.folder}: tensors have changed already, so end this process"
        replica, parts = parallel_state.get_data_parallel_rank(with_context_parallel=True), leaves(self.optimizer)
        weights = {str(number): piece.tensor.detach() for number, piece in enumerate(self.pieces)}
        fill(self.weights.plan(), weights, replica=replica, subject=subject)
        if self.shares is None:
            for part in filter(is_mixed, parts):
                part.reload_model_params()
            return
        groups = self.groups()
        for part in parts:
            part.load_state_dict(states_of(part, groups))
            allocate(part)
        states = {
            f"{number} {kind}": held.detach()
            for number, share in enumerate(self.shares)
            for kind, held in share.tensors().items()
            if kind in self.kinds and _apart(share, kind)
        }
        one_copy = all(map(is_distributed, parts))
        fill(self.states.plan(), states, replica=0 if one_copy else replica, subject=subject)
        for part in parts:
            note_loaded(part, True)


def _apart(share: Share, kind: str) -> bool:
    """Whether a state is a tensor of its own: an fp32 parameter is its own master, and filled as the weight."""
    return kind != MASTER or element_type(share.piece.tensor.dtype) is not ElementType.FLOAT32


def planned(
    saved: Saved, source: Checkpoint, load: Load, run: Mapping[str, object], *, optimizer: bool, models: object
) -> Taken:
    """This rank's reads; raises everything that is wrong with them, with `--finetune` but for names of `torch_dist`."""
    pieces, faults = pieces_of(models), list[Fault]()
    shares = shares_of(load.optimizer, pieces) if optimizer else None
    kinds = kinds_read(source, load.policy, load.optimizer, faults) if optimizer else ()
    weights, states = Reads(), Reads()
    own, there, rows = dict[str, Shape](), dict[str, Shape](), set[tuple[int, int]]()
    for number, piece in enumerate(pieces):
        keys = [TensorKey(name=piece.name, kind=kind) for kind in (WEIGHT, MASTER)]
        placed = {key.kind: source.layout[key] for key in keys if key in source.layout}
        own[piece.name] = piece.shape
        if WEIGHT not in placed:
            if not (saved.whole or piece.tensor.is_floating_point()):
                raise unsupported(piece.name, "format torch is read without tensors of whole numbers")
            continue
        shape = placed[WEIGHT].shape
        padded = piece.padded and shape[1:] == piece.shape[1:]
        there[piece.name] = piece.shape if padded else shape
        rows |= {(shape[0], piece.shape[0])} if padded else set()
        dtype, types = element_type(piece.tensor.dtype), {kind: one.dtype for kind, one in placed.items()}
        kind = choose_source(piece.name, dtype, types, faults, casts=True, mend=MODEL)
        if kind is not None and there[piece.name] == piece.shape:
            key = keys[0]._replace(kind=kind)
            weights.read(source, key, piece, (0, piece.tensor.numel()), str(number), dtype)
    faults += vocabulary_faults(load, (saved.arguments, run), saved.folder, rows)
    if run.get("finetune") and saved.whole:
        own = {name: own[name] for name in there}
    kept = {key.name for key in source.layout.placements if key.kind == WEIGHT}
    faults += named_alike(match_tensors(own, there, mend=MODEL), own, kept, saved.folder, by_name=saved.states_by_name)
    for number, share in enumerate(shares or ()):
        for kind in kinds if there.get(share.piece.name) == share.piece.shape else ():
            key = TensorKey(name=share.piece.name, kind=kind)
            key = key if key in source.layout else key._replace(kind=WEIGHT)
            if _apart(share, kind):
                elements, buffer = (share.start, share.stop), f"{number} {kind}"
                states.read(source, key, share.piece, elements, buffer, ElementType.FLOAT32)
    faults += source.index.faults
    raise_faults(faults, subject=f"loading {saved.folder}")
    return Taken(
        saved=saved,
        optimizer=load.optimizer,
        source=source,
        pieces=pieces,
        shares=shares,
        kinds=kinds,
        weights=weights,
        states=states,
        same_grid=same_grid(saved, run),
        random=_random(source, saved, run),
    )


def named_alike(
    faults: list[Fault], run: Collection[str], there: Collection[str], where: str, *, by_name: bool
) -> list[Fault]:
    """The same, with what mends them if a wrapper, or one module around all, explains the names of one side.

    `by_name` is whether states lie by the names of parameters, so that a conversion keeps them.
    """
    absent = [one for one in faults if one.what in TENSORS]
    names = patterns(there, run) if absent else None
    if names is None:
        return faults
    mend = "give the parameters of the model the names that were saved: another module is around it in one of the runs"
    if by_name:
        first = f"ds-reshard convert {where} MID --to dcp --names map.json"
        last = "ds-reshard convert MID OUT --to megatron"
        mend = f"write {json.dumps(names)} to map.json and give --load OUT, which these make:\n{first}\n{last}"
    return [replace(one, mend=mend) if one in absent else one for one in faults]


def same_grid(saved: Saved, run: Mapping[str, object]) -> bool:
    """Whether a rank of this run is a rank of the saved grid, whose random states were saved."""
    each = bool(saved.arguments.get(_EACH)), bool(run.get(_EACH))
    names = (_TP, _PP, _EP, *(("data_parallel_size",) if any(each) else ()))
    was, now = (tuple(size_of(held, name) for name in names) for held in (saved.arguments, run))
    return was == now and each[0] is each[1]


def _random(source: Checkpoint, saved: Saved, run: Mapping[str, object]) -> object:
    """What Megatron sets this rank's generators to, where it is the same model-parallel rank as before; else None.

    Each rank of such a grid has seeds of its own: under another one no saved state is any rank's. In format `torch`
    each rank of experts has saved its own, in `torch_dist` the first of them.
    """
    from megatron.core import parallel_state

    if not same_grid(saved, run):
        return None
    tp, pp = (size_of(run, name) for name in (_TP, _PP))
    t = parallel_state.get_tensor_model_parallel_rank()
    p = parallel_state.get_pipeline_model_parallel_rank()
    state = cast(OpenedMegatron, source).state
    if isinstance(state, TorchFormat):
        held = state.random.get((t, p, parallel_state.get_expert_model_parallel_rank()))
    else:
        place = saved.objects.get(f"rng_state/shard_{p}.{t}_{pp}.{tp}")
        held = read_object(place) if place is not None else None
    listed = held if isinstance(held, list) else [held]
    if held is None:
        return None
    return revive(listed, builders={}, tensor=read_tensor, where=f"{saved.folder}: random states")


def kinds_read(source: Checkpoint, policy: ResumePolicy, optimizer: object, faults: list[Fault]) -> tuple[str, ...]:
    """Return the kinds of state to read of each parameter; add a fault if the run keeps others or no step was saved."""
    layout, mend = source.layout, "build the optimizer that was saved, or add --no-load-optim"
    of_run = kinds_of(optimizer)
    if of_run is None:
        what = "this run's optimizer is no variant of Adam, and only Adam's states are read here"
        again = "load it as it was saved, or add --no-load-optim"
        faults.append(UnsupportedLayout.fault(source.folder, what, mend=again))
        return ()
    names = {key.name for key in layout.placements if key.kind != WEIGHT}
    if not names:
        what = "; ".join(source.notes) or "holds no state of an optimizer"
        faults.append(UnsupportedLayout.fault(source.folder, what, mend="add --no-load-optim"))
    for name in sorted(names):
        held = set(layout.kinds(name)) - {WEIGHT, MASTER}
        if held != of_run:
            sides = ", ".join(sorted(held)), ", ".join(sorted(of_run))
            faults.append(ModelMismatch.fault(name, "was saved with other optimizer states", *sides, mend=mend))
    scalars = source.facts.scalars.values() if source.facts is not None else ()
    steps = {number_of(states["step"]) for states in scalars if "step" in states}
    counted = policy.loads_moments and bool(names) and "exp_avg_sq" in of_run  # else counting begins anew
    if counted and (len(steps) > 1 or (not steps and source.objects.get((STEPS,)))):
        what = "its optimizer's step is missing, or differs between parameters"
        faults.append(UnsupportedLayout.fault(source.folder, what, "one step", str(sorted(map(str, steps))), mend=mend))
    return (MASTER, *(sorted(of_run) if policy.loads_moments else ()))


def vocabulary_faults(
    load: Load, runs: Runs, where: str, padded: Iterable[tuple[int, int]] | None = None, tokens: int | None = None
) -> list[Fault]:
    """A fault where rows of embeddings are other words: of `torch_dist` Megatron drops them, or makes them of zeros.

    `allow_shape_mismatch` of core/tensor_parallel/layers.py, 0.18.2 and 0.19.2. With `--finetune` that is a warning.
    Rows that are `padded` are pairs, as saved and now; else the arguments tell them.
    """
    told = (runs[0].get("padded_vocab_size"), runs[1].get("padded_vocab_size"))
    padded = padded if padded is not None else [cast("tuple[int, int]", told)] * all(told)
    what = "is of another vocabulary: the rows are no padding of the same one"
    mend = "give the tokenizer and the sizes of the vocabulary that were saved"
    tokens = tokens or _tokens()
    other = [pair for pair in padded if pair[0] != pair[1] and not same_vocabulary(*pair, runs, tokens)]
    if not runs[1].get("finetune"):
        return [ModelMismatch.fault(where, what, f"{rows} rows", f"{now} rows", mend=mend) for rows, now in other]
    said = [f"the vocabulary: {what} ({rows} rows as saved, {now} rows now)" for rows, now in other]
    load.warnings += [text for text in said if text not in load.warnings]  # Megatron's own load is looked at twice
    return []


def same_vocabulary(saved: int, rows: int, runs: Runs, tokens: int | None) -> bool:
    """Whether so many rows each are one vocabulary, padded by the rules of the saving run and of this one."""
    least, most = max(saved - _padding(runs[0]), rows - _padding(runs[1])), min(saved, rows)
    return least < most and (tokens or most) <= most


def _padding(arguments: Mapping[str, object]) -> int:
    """A multiple of how many rows the vocabulary is padded to (megatron/training, `_vocab_size_with_padding`)."""
    return size_of(arguments, "make_vocab_size_divisible_by") * size_of(arguments, "tensor_model_parallel_size")


def _tokens() -> int | None:
    """The real vocabulary of this run's tokenizer, where it has one that tells."""
    from megatron.training import global_vars

    size = getattr(getattr(global_vars, "_GLOBAL_TOKENIZER", None), "vocab_size", None)
    return size if isinstance(size, int) else None
