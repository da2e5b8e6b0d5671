"""Whether a checkpoint fits a running optimizer: every finding, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from ds_reshard.errors import Fault, ModelMismatch, ParamGroupMismatch, ScheduleMismatch
from ds_reshard.execution.buffers import element_type
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.optimizer_file import MASTER
from ds_reshard.hosts.nanotron.current import Group, recall
from ds_reshard.hosts.nanotron.live import Held, Live, Shape
from ds_reshard.model.codec import ElementType
from ds_reshard.resume.policy import ResumePolicy

_FACTORY = "the same model and optimizer.optimizer_factory, or --no-load-optim to begin the optimizer anew"
_SHOWN = 8
# One of the hyper-parameters that only this kind of optimizer has.
_KINDS = {"betas": "Adam", "momentum": "SGD"}


def findings(live: Live, checkpoint: NanotronCheckpoint, policy: ResumePolicy) -> Iterator[Fault]:
    """What does not fit of what this rank trains: names, shapes, kinds of states, element types, masters, groups."""
    states = states_of(checkpoint)
    yield from absent(checkpoint.folder, [name for name in live.held if name not in states])
    for name, held in live.held.items():
        if name not in states:
            continue
        shape = checkpoint.parameters[name].shape
        if shape != held.shape:
            yield _mismatch(name, "has another shape", str(list(shape)), str(list(held.shape)))
        yield from unlike(live, held, states[name], policy)
    yield from other_cuts(live, checkpoint)
    memory = recall(live.base)
    assert memory is not None, "load_optimizer has remembered it"
    for names, run in zip(live.groups, memory.run, strict=True):
        yield from _group(checkpoint, names, run, policy)


def unlike(live: Live, held: Held, kinds: Mapping[str, ElementType], policy: ResumePolicy) -> Iterator[Fault]:
    """What does not fit of the saved states of one parameter."""
    if (MASTER in kinds) != (live.accumulator is not None):
        with_masters = "with fp32 masters (accumulate_grad_in_fp32: true)"
        said = (with_masters, "without") if MASTER in kinds else ("without fp32 masters", "with them")
        yield ModelMismatch.fault(
            "fp32 masters",
            "are on one side only",
            f"saved {said[0]}",
            f"this run is {said[1]}",
            mend=f"optimizer.accumulate_grad_in_fp32: {str(MASTER in kinds).lower()}, "
            "or --no-load-optim to begin the optimizer anew from the weights",
        )
    if not policy.loads_moments:
        return
    wanted = element_type(held.tensor.dtype)
    for kind, dtype in kinds.items():
        if kind != MASTER and dtype is not wanted:
            yield _mismatch(f"{kind} of {held.name}", "is of another element type", dtype.label, wanted.label)


def other_cuts(live: Live, checkpoint: NanotronCheckpoint) -> Iterator[Fault]:
    """Parameters of equal shape that are cut over the tensor-parallel ranks in other chunks.

    nanotron takes the weights of a rank as they are where tp and pp are those that were saved, so weights and states
    would be of different rows.
    """
    sizes = (live.topology.pp, live.topology.tp)
    if live.topology.tp == 1 or sizes != (checkpoint.topology.pp, checkpoint.topology.tp):
        return
    for name, held in live.held.items():
        parameter = checkpoint.parameters.get(name)
        if parameter is None or parameter.shape != held.shape:
            continue
        then = tuple(parameter.tiles_at(live.rank.tp))
        if then != held.tiles:
            said = (
                ", ".join(f"{list(tile.box.size)} at {list(tile.box.offset)}" for tile in tiles[:4])
                for tiles in (then, held.tiles)
            )
            yield _mismatch(name, "is cut over the tensor-parallel ranks in other chunks", *said)


def absent(folder: str, names: Sequence[str]) -> Iterator[Fault]:
    """Parameters of this run that the checkpoint has no states of."""
    if names:
        yield _mismatch(folder, "has no optimizer states of parameters of this run", "states of each", some(names))


def left_over(checkpoint: NanotronCheckpoint, held: Collection[str], shapes: Mapping[str, Shape]) -> Iterator[Fault]:
    """Parameters that no rank of this run has, and other totals; `held` and `shapes` are of all ranks."""
    saved = states_of(checkpoint)
    beyond = [name for name in saved if name not in held]
    if beyond:
        yield _mismatch(
            checkpoint.folder, "has optimizer states of parameters that this run has not", some(beyond), "none of them"
        )
    total = sum(prod(checkpoint.parameters[name].shape) for name in saved)
    now = sum(prod(shape) for shape in shapes.values())
    if total != now:
        yield _mismatch(checkpoint.folder, "is of another number of elements in all", str(total), str(now))


def states_of(checkpoint: NanotronCheckpoint) -> dict[str, dict[str, ElementType]]:
    """The element type of each kind of state, by parameter."""
    return {
        name: {kind: tensor.dtype for kind, tensor in kinds.items()}
        for stage in reversed(checkpoint.stages)
        for name, kinds in stage.states.items()
    }


def saved_group(checkpoint: NanotronCheckpoint, names: Sequence[str]) -> list[Mapping[str, object]]:
    """The values of the saved param groups that these parameters were in, each once."""
    assert checkpoint.facts is not None
    found: list[Mapping[str, object]] = []
    for group in checkpoint.facts.groups:
        values = group.hyperparameters
        if values is not None and set(names) & set(group.members) and values not in found:
            found.append(values)
    return found


def _group(checkpoint: NanotronCheckpoint, names: Sequence[str], group: Group, policy: ResumePolicy) -> Iterator[Fault]:
    saved = saved_group(checkpoint, names)
    if len(saved) > 1:
        differ = sorted({key for values in saved for key in values if values.get(key) != saved[0].get(key)})
        yield ParamGroupMismatch.fault(
            some(names),
            f"are in one param group, and were in several that differ in {', '.join(differ)}",
            f"{len(saved)} groups",
            "one",
            mend="build the param groups as the saving run did, or --no-load-optim",
        )
    for values in saved[:1] if policy.loads_moments else ():
        for key, kind in _KINDS.items():
            if (key in values) != (key in group):
                said = (f"saved by {kind}", "another") if key in values else ("saved by another", kind)
                yield _mismatch(some(names), "would be trained by another optimizer", *said)
        if policy.scheduler == "strict" and not policy.takes("weight_decay"):
            then, now = values.get("weight_decay"), group.get("weight_decay")
            if then != now:
                yield ScheduleMismatch.fault(
                    f"weight_decay of {some(names)}",
                    "differs from the checkpoint's",
                    str(then),
                    str(now),
                    mend="give the saved value, or --override-opt-param-scheduler to go on with this run's",
                )


def some(names: Collection[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _mismatch(where: str, what: str, expected: str, found: str) -> Fault:
    return ModelMismatch.fault(where, what, expected, found, mend=_FACTORY)
