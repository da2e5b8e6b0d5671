"""A load under another topology, straight from the files: each rank reads what it owns.

Megatron's own `load_checkpoint` still runs, for all that is not a tensor: it compares arguments, sets iteration,
samples and schedule, through the seams that every load has. It is told that model and optimizer are not to be loaded
(`skip_load_to_model_and_opt`), and given what the checkpoint says beside its tensors as if it had read that itself.
Before that every rank has opened the files and planned its reads, weights have proved whose the states are, and all
ranks have agreed; afterwards weights, masters and states are filled in place. Seams that were seen to work in 0.18.2
and 0.19.2: training/checkpointing.py `load_checkpoint`, `check_checkpoint_args`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePath
from types import SimpleNamespace
from typing import NamedTuple, cast

from ds_reshard.containers import folders
from ds_reshard.containers.digests import digests
from ds_reshard.containers.remote import is_url
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, faults_of, raise_faults
from ds_reshard.execution.buffers import element_type, read_tensor
from ds_reshard.execution.checksums import SEEN_BY_ALL
from ds_reshard.formats.megatron.checkpoint import TRACKER, chain_of, read_object
from ds_reshard.formats.megatron.door import OpenedMegatron
from ds_reshard.formats.megatron.flat_states import size_of
from ds_reshard.formats.megatron.torch_format import FLAT_FILE
from ds_reshard.hosts.megatron.group_values import note_loaded
from ds_reshard.hosts.megatron.groups import dealt, experts_differ, is_plain
from ds_reshard.hosts.megatron.live import Group, Load, leaves, live_groups
from ds_reshard.hosts.megatron.pieces import (
    Piece,
    Share,
    allocate,
    is_distributed,
    is_mixed,
    is_torch_adam,
    kinds_of,
    pieces_of,
    shares_of,
)
from ds_reshard.hosts.megatron.topology import OWN_ADAM, Saved, find_saved, may_be_shifted, reasons, unfillable
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import MASTER, STEPS, WEIGHT
from ds_reshard.model.facts import ScalarTensor, number_of
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Region, Shape
from ds_reshard.operations.filling import fill
from ds_reshard.operations.matching import TRAINED, choose_source, match_tensors
from ds_reshard.operations.proof import unproved
from ds_reshard.operations.ranks import Steps, agree, attempt, file_faults, rank, same_files, unseen_faults, world_size
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Fill, Plan, copies_of
from ds_reshard.resume.policy import ResumePolicy, differences, policy_differences
from ds_reshard.resume.report import unwritable

Base = tuple[object, str, bool, object]
MODEL = "build the model that was saved: compare the arguments of both runs"
STATES = "train the parameters that the saving run has trained, or add --no-load-optim"
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
    """A load that is not left to Megatron: why, what was opened, and what this rank reads of it.

    A run that is still to come has no tensors. `shares` are None where the optimizer's state is not loaded; `kinds` are
    those that are read of each parameter.
    `random` has the random states as Megatron takes them, None where they are not those of this rank.
    """

    saved: Saved
    why: list[str]
    source: Checkpoint
    random: object
    optimizer: object | None = None
    pieces: list[Piece] = field(default_factory=list)
    shares: list[Share] | None = None
    kinds: tuple[str, ...] = ()
    weights: Reads = field(default_factory=Reads)
    states: Reads = field(default_factory=Reads)

    def answer(self) -> Base:
        """What `_load_base_checkpoint` returns for such a load: all but the tensors, as plain values."""
        from megatron.training import checkpointing

        common = self.saved.common
        if hasattr(checkpointing, "set_loaded_iteration"):
            checkpointing.set_loaded_iteration(common.get("iteration"))
        kept = ("iteration", "checkpoint_version", "opt_param_scheduler", "lr_scheduler", "total_iters")
        state = {name: common[name] for name in (*kept, "num_floating_point_operations_so_far") if name in common}
        chain = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        found, unread, _ = attempt(lambda: [self._state(part) for part in chain])
        raise_faults(unread if self.shares is not None else [], subject=f"loading {self.saved.folder}")
        states: list[object] = list(found or [{}])
        state |= {"args": SimpleNamespace(**self.saved.arguments), "rng_state": self.random}
        state |= {"optimizer": states[0] if len(states) == 1 else dict(enumerate(states))}
        return state, self.saved.folder, False, checkpointing.CheckpointType.LEGACY

    @property
    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The tensors that this rank has, and those that it trains."""
        return frozenset(one.name for one in self.pieces), frozenset(one.piece.name for one in self.shares or ())

    def _state(self, part: object) -> dict[str, object]:
        """The state of one optimizer as its `load_state_dict` takes it, without tensors.

        Entry i names the parameters of live group i, whichever group its values are of: states go by name here.
        """
        inner = getattr(part, "optimizer", None)
        live = inner.state_dict()["param_groups"] if inner is not None else []
        groups = dealt(self.groups(), live)
        for group, mine in zip(groups, live, strict=False):
            group["params"] = mine["params"]
        held: dict[str, object] = {"state": {}, "param_groups": groups}
        return {"optimizer": held, "fp32_from_fp16_params": []} if is_mixed(part) else held

    def groups(self) -> list[Group]:
        """The saved param groups; a step that only some of them have is that of all."""
        chain = chain_of(self.saved.common.get("optimizer"), self.saved.objects) or ()
        found = [group for groups in chain for group in groups]
        groups = [{k: v for k, v in group.items() if k != "params" and is_plain(v)} for group in found]
        scalars = self.source.facts.scalars if self.source.facts is not None else {}
        told = [one.get("step") for one in (*groups, *scalars.values())]
        steps = {number_of(one) for one in told if isinstance(one, ScalarTensor | int | float)}
        step = steps.pop() if len(steps) == 1 else None
        return [{**group, "step": int(step)} for group in groups] if step is not None else groups

    def load(self, original: Callable[..., tuple[int, object]], arguments: Namespace) -> tuple[int, object]:
        """Megatron's own load without its tensors, then the tensors. Collective."""
        told = {"ckpt_format": "torch", "use_dist_ckpt": True, "use_distributed_optimizer": False}
        told |= {"no_load_rng": True} if self.random is None else {}
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
        for part in parts:
            part.load_state_dict(self._state(part))
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


class Said(NamedTuple):
    """What a rank says once it has looked: where, what it was asked for, who it thinks loads, and what it has read."""

    where: str
    policy: ResumePolicy
    asked: dict[str, object]
    decided: tuple[str, list[str]] | None
    files: dict[str, bytes]


_ASKED = ("ckpt_step", "pretrained_checkpoint")
"""What says which files are loaded, beside what the policy says of them, and their place."""


def take(load: Load, arguments: Namespace, models: object, announced: Sequence[Fault]) -> Taken | None:
    """Decide who loads; where that is not Megatron, everything that can be refused is. Collective.

    `announced` is what is wrong before anything is read. States that Megatron may have saved shifted are looked at
    whoever loads. Nothing has changed where it raises, on any rank.
    """
    wanted = load.optimizer is not None and not arguments.finetune and not arguments.no_load_optim
    apart = any(group.get("is_expert_parallel") for part in leaves(load.optimizer) for group in live_groups(part))
    decided = _agreed(load, arguments, wanted, apart, announced)
    if decided is None:
        return None
    saved, why = decided
    folder = saved.folder
    steps, subject = Steps(), f"loading {folder}"

    def planned() -> Taken:
        assert source is not None
        return _planned(saved, source, why, load, wanted, models, vars(arguments))

    def proved() -> None:
        names = None if wanted else frozenset[str]()
        raise_faults(() if source is None else unproved(source, names, part=rank(), of=world_size()), subject=subject)

    with same_files(subject=subject):
        source = steps.take(lambda: opened(load, saved, vars(arguments), why, wanted), subject=subject)
        taken = steps.take(planned, subject=subject) if why else None
        steps.take(proved, subject=subject)
    if not why:
        steps.agree()
        return None
    said = steps.gather(taken.names if taken is not None else None)
    steps.raise_first(said)
    assert taken is not None
    told = [cast("tuple[frozenset[str], frozenset[str]]", one.value) for one in said]
    has, trains = (dict.fromkeys(frozenset().union(*names)) for names in zip(*told, strict=True))
    placed = taken.source.layout.placements
    faults = match_tensors(has, {key.name: None for key in placed if key.kind == WEIGHT}, mend=MODEL)
    if taken.shares is not None:
        trained = {key.name: None for key in placed if key.kind != WEIGHT}
        faults += match_tensors(trains, trained, words=TRAINED, mend=STATES)
    raise_faults(faults, subject=subject)
    agree(experts_differ(taken.groups(), folder) if wanted and not apart else (), subject=subject)
    load.read_in_place = True
    return taken


def opened(load: Load, saved: Saved, run: Mapping[str, object], why: Sequence[str], wanted: bool) -> Checkpoint | None:
    """The files, to be read or, where Megatron loads them, to be looked at: None for those that are not read here."""
    if why:
        raise_faults(unfillable(saved, run, "; ".join(why), optimizer=wanted), subject=f"loading {saved.folder}")
    source = None
    try:
        source = open_checkpoint(find_listing(saved.folder, None), whole=False, optimizer=wanted)
        said = "; ".join(source.notes)
    except UnsupportedLayout as error:
        if why or any(fault.error != UnsupportedLayout.__name__ for fault in error.faults):
            raise
        said = "; ".join(dict.fromkeys(fault.what for fault in faults_of(error)))
    if said and not why:
        load.warnings.append(f"whether Megatron-LM has saved its states shifted was not looked at: {said}")
    return source


def _agreed(
    load: Load, arguments: Namespace, wanted: bool, apart: bool, announced: Sequence[Fault]
) -> tuple[Saved, list[str]] | None:
    """The checkpoint, and what `decided_by` says of it, once all ranks were asked for the same and see the same.

    Collective. What Megatron loads may lie in a folder of another name on each node.
    """
    steps, where = Steps(), str(arguments.load)
    subject = f"loading {where}"

    def look() -> tuple[Saved | None, list[str] | None]:
        saved = find_saved(arguments)
        if saved is not None and rank() == 0:
            raise_faults(unwritable(load.policy.report), subject=subject)
        own_adam = wanted and any(map(is_torch_adam, leaves(load.optimizer)))
        why = decided_by(saved, arguments, wanted, apart, own_adam=own_adam)
        if saved is not None and wanted and not why:
            sizes, _, _ = attempt(lambda: list(_other_buffers(saved, load.optimizer)))  # what is damaged is told later
            load.buffers = sizes or []
        return saved, why

    with digests() as read:
        steps.take(lambda: raise_faults(announced, subject="resume policy"), subject="resume policy")
        saved, why = steps.take(look, subject=subject) or (None, None)
    decided = (saved, why) if saved is not None and why is not None else None
    asked = {name: getattr(arguments, name, None) for name in _ASKED}
    files = {path.removeprefix(f"{where.rstrip('/')}/"): found for path, found in read.items()}
    folder = (decided[0].folder, decided[1]) if decided is not None else None
    told = steps.gather(Said(where, load.policy, asked, folder, files))
    said = [cast(Said, one.value) for one in told]
    mend = "give every rank the same command line"
    faults = policy_differences([one.policy for one in said])
    faults += differences([one.asked for one in said], where="arguments of Megatron-LM", mend=mend)
    raise_faults(faults, subject="loading")
    steps.raise_first(told)
    where = said[0].where
    subject = f"loading {where}"
    faults = unseen_faults(where, [bool(one.files) for one in said])
    raise_faults(faults or file_faults([one.files for one in said]), subject=subject)
    folders = [{"checkpoint, and why Megatron-LM does not load it": one.decided} for one in said]
    raise_faults(differences(folders, where=where, mend=SEEN_BY_ALL), subject=subject)
    return decided


def decided_by(
    saved: Saved | None, arguments: Namespace, wanted: bool, apart: bool, *, own_adam: bool = False
) -> list[str] | None:
    """Why a checkpoint is not left to Megatron; None where it is, nothing where it is once its states are proved.

    `apart` is whether this run's experts have an optimizer of their own. `own_adam` says that its distributed optimizer
    steps by torch's own Adam, of which Megatron finds no step where it looks for it: a KeyError, or an AssertionError
    without a word, in each format (core/optimizer/distrib_optimizer.py, HAVE_APEX_OR_TE, 0.18.2 and 0.19.2).
    """
    by_url = is_url(str(getattr(arguments, "load", None)))
    if by_url and (saved is None or getattr(arguments, "pretrained_checkpoint", None)):
        _refuse_left_over(arguments)
    if saved is None:
        return None
    why = reasons(saved, vars(arguments), optimizer=wanted, apart=apart)
    why += [OWN_ADAM] * own_adam
    why += ["it is read by URL"] * by_url
    why += ["--ds-reshard-always"] * bool(getattr(arguments, "ds_reshard_always", False))
    return why if why or (wanted and may_be_shifted(saved)) else None


_FROZEN = "train the parameters that the saving run has trained (requires_grad), or add --no-load-optim"


def _other_buffers(saved: Saved, optimizer: object) -> Iterator[Fault]:
    """A fault for each flat buffer of this rank of another size, as of a parameter that one of the runs has frozen.

    Megatron stops there when weights have changed (`load_parameter_state_from_dp_reshardable` and `_from_dp_zero` of
    core/optimizer/distrib_optimizer.py, 0.18.2 and 0.19.2).
    """
    for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        now = [sum(sum(sizes) for sizes in one.values()) for one in getattr(part, "per_bucket_numel_unpadded", ())]
        then = (_bucket_sizes if saved.whole else _buffer_sizes)(saved, part, number) if now else None
        for chunk, sizes in enumerate(zip(then or (), now, strict=False)):
            if sizes[0] != sizes[1]:
                what = f"the optimizer's state of model chunk {chunk} is of other parameters than this run trains"
                counted = [f"{size} elements on this rank" for size in sizes]
                yield ModelMismatch.fault(saved.folder, what, *counted, mend=_FROZEN)


def _bucket_sizes(saved: Saved, part: object, number: int) -> list[int] | None:
    """Elements of each buffer of `torch_dist` with sharding type dp_reshardable, None where that is not told."""
    name = f"optimizer.distributed.dp_group_idx_{getattr(part, 'data_parallel_group_idx', 0)}.per_bucket_numel_unpadded"
    keys = [f"{prefix}{name}/shard_0_1" for prefix in (f"chained_{number}.", "")]
    place = next((saved.objects[key] for key in keys if key in saved.objects), None)
    held = read_object(place) if place is not None else None
    listed = held if isinstance(held, list) else [held]
    rows = [one for one in listed if isinstance(one, Mapping)]
    if len(rows) < len(listed):
        return None
    return [sum(sum(sizes) if isinstance(sizes, list) else sizes for sizes in one.values()) for one in rows]


def _buffer_sizes(saved: Saved, part: object, number: int) -> list[int] | None:
    """Elements of each buffer of format `torch`, None where this rank's file does not tell."""
    from megatron.training.checkpointing import get_checkpoint_name

    step = PurePath(saved.folder).name.removeprefix("iter_")
    path = PurePath(get_checkpoint_name(str(PurePath(saved.folder).parent), int(step))).with_name(FLAT_FILE)
    if not folders.is_file(str(path)):
        return None
    with open_archive(str(path)) as archive:
        held = archive.load()
    flat = (held[number] if number < len(held) else None) if isinstance(held, list) else held
    found = list[int]()
    while isinstance(flat, Mapping) and isinstance(flat.get(len(found)), Mapping):
        found.append(sum(one.get("numel_unpadded", 0) for one in flat[len(found)].values()))
    return found


def _refuse_left_over(arguments: Namespace) -> None:
    """Of a URL what would be left to Megatron, which takes it for a folder that is not there, and begins anew."""
    apart = "--pretrained-checkpoint stands beside it" if getattr(arguments, "pretrained_checkpoint", None) else ""
    if apart or folders.is_file(f"{arguments.load}/{TRACKER}"):
        what = apart or "holds no checkpoint of the formats torch and torch_dist, or it is Megatron's own choice which"
        mend = "copy it to a local folder, and give that"
        fault = UnsupportedLayout.fault(arguments.load, f"cannot be read by URL: {what}", mend=mend)
        raise_faults([fault], subject="resuming by URL")


def _planned(
    saved: Saved,
    source: Checkpoint,
    why: list[str],
    load: Load,
    wanted: bool,
    models: object,
    run: Mapping[str, object],
) -> Taken:
    """This rank's reads; raises everything that is wrong with them."""
    pieces, faults = pieces_of(models), list[Fault]()
    shares = shares_of(load.optimizer, pieces) if wanted else None
    kinds = kinds_read(source, load.policy, load.optimizer, faults) if wanted else ()
    weights, states = Reads(), Reads()
    own, there = dict[str, Shape](), dict[str, Shape]()
    for number, piece in enumerate(pieces):
        keys = [TensorKey(name=piece.name, kind=kind) for kind in (WEIGHT, MASTER)]
        placed = {key.kind: source.layout[key] for key in keys if key in source.layout}
        own[piece.name] = piece.shape
        if WEIGHT not in placed:
            continue
        shape = placed[WEIGHT].shape
        there[piece.name] = piece.shape if _is_padded(shape, piece, saved, run, faults) else shape
        dtype, types = element_type(piece.tensor.dtype), {kind: one.dtype for kind, one in placed.items()}
        kind = choose_source(piece.name, dtype, types, faults, casts=True, mend=MODEL)
        if kind is not None and there[piece.name] == piece.shape:
            key = keys[0]._replace(kind=kind)
            weights.read(source, key, piece, (0, piece.tensor.numel()), str(number), dtype)
    faults += match_tensors(own, there, mend=MODEL)
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
        why=why,
        optimizer=load.optimizer,
        source=source,
        pieces=pieces,
        shares=shares,
        kinds=kinds,
        weights=weights,
        states=states,
        random=_random(source, saved, run),
    )


def random_kept(saved: Saved, run: Mapping[str, object]) -> bool:
    """Whether a rank of this run is a rank of the saved grid, whose random states were saved.

    In format `torch` each rank of experts has saved its own, and only the first one's is read.
    """
    was, now = (tuple(size_of(held, name) for name in (_TP, _PP, _EP)) for held in (saved.arguments, run))
    return was == now and (was[2] == 1 or saved.whole)


def _random(source: Checkpoint, saved: Saved, run: Mapping[str, object]) -> object:
    """What Megatron sets this rank's generators to, where it is the same model-parallel rank as before; else None.

    Each rank of such a grid has seeds of its own: under another one no saved state is any rank's.
    """
    from megatron.core import parallel_state

    if not random_kept(saved, run):
        return None
    tp, pp = (size_of(run, name) for name in (_TP, _PP))
    t = parallel_state.get_tensor_model_parallel_rank()
    p = parallel_state.get_pipeline_model_parallel_rank()
    key = f"rng_state/shard_{p}.{t}_{pp}.{tp}"
    place = saved.objects.get(key)
    states = cast(OpenedMegatron, source).state.random_states() if not saved.whole else {}
    held = read_object(place) if place is not None else states.get(key)
    listed = held if isinstance(held, list) else [held]
    each = parallel_state.get_data_parallel_world_size() if run.get("data_parallel_random_init") else 1
    if held is None or len(listed) != each:
        return None
    return revive(listed, builders={}, tensor=read_tensor, where=f"{saved.folder}: random states")


def kinds_read(source: Checkpoint, policy: ResumePolicy, optimizer: object, faults: list[Fault]) -> tuple[str, ...]:
    """The kinds of state that are read of every parameter; faults where the two keep others, or Adam tells no step."""
    layout, mend = source.layout, "build the optimizer that was saved, or add --no-load-optim"
    of_run = kinds_of(optimizer)
    if of_run is None:
        what = "this run's optimizer is none of Adam's kind, whose states alone are read here"
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
            faults.append(ModelMismatch.fault(name, "its optimizer kept other states", *sides, mend=mend))
    scalars = source.facts.scalars.values() if source.facts is not None else ()
    steps = {number_of(states["step"]) for states in scalars if "step" in states}
    counted = policy.loads_moments and bool(names) and "exp_avg_sq" in of_run  # else counting begins anew
    if counted and (len(steps) > 1 or (not steps and source.objects.get((STEPS,)))):
        what = "its optimizer's step is not told, or is another of other parameters"
        faults.append(UnsupportedLayout.fault(source.folder, what, "one step", str(sorted(map(str, steps))), mend=mend))
    return (MASTER, *(sorted(of_run) if policy.loads_moments else ()))


def _is_padded(shape: Shape, piece: Piece, saved: Saved, run: Mapping[str, object], faults: list[Fault]) -> bool:
    """Whether other rows than were saved pad the same vocabulary; a fault is added if they are of another one."""
    if not piece.padded or shape[1:] != piece.shape[1:]:
        return False
    if shape != piece.shape and not same_vocabulary(shape[0], piece.shape[0], (saved.arguments, run), _tokens()):
        what, mend = _OTHER_VOCABULARY
        faults.append(ModelMismatch.fault(piece.name, what, str(list(piece.shape)), str(list(shape)), mend=mend))
    return True


_OTHER_VOCABULARY = (
    "is of another vocabulary: the rows are no padding of the same one",
    "give the tokenizer and the sizes of the vocabulary that were saved",
)


def other_vocabulary(
    saved: Mapping[str, object], run: Mapping[str, object], where: str, tokens: int | None = None
) -> list[Fault]:
    """A fault where rows of embeddings are other words: of `torch_dist` Megatron drops them, or makes them of zeros.

    `allow_shape_mismatch` of core/tensor_parallel/layers.py, 0.18.2 and 0.19.2.
    """
    rows, now = (held.get("padded_vocab_size") for held in (saved, run))
    if not isinstance(rows, int) or not isinstance(now, int) or rows == now:
        return []
    if same_vocabulary(rows, now, (saved, run), tokens or _tokens()):
        return []
    what, mend = _OTHER_VOCABULARY
    return [ModelMismatch.fault(where, what, f"{rows} rows", f"{now} rows", mend=mend)]


def same_vocabulary(
    saved: int, rows: int, runs: tuple[Mapping[str, object], Mapping[str, object]], tokens: int | None
) -> bool:
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
