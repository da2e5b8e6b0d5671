"""`inspect`: what a checkpoint says about itself, told by its format, or from its layout and facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_reshard.containers.plain import group_entries, plain
from ds_reshard.errors import Fault, ReshardError, faults_of
from ds_reshard.model.checkpoint import Checkpoint, SavedListing
from ds_reshard.model.content import SAMPLES, STEPS
from ds_reshard.model.facts import GroupFacts, Scalar
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.reports import FileEntry, Inspection, ParameterEntry, Steps, states_of
from ds_reshard.operations.source import Found, open_ahead, open_checkpoint


@gc_disabled()
def describe(found: Found) -> Inspection:
    """What the files tell, and every fault: where the checkpoint cannot be opened, its files alone."""
    open_ahead(found)
    listing = found.listing
    if found.format.describe is not None:
        return found.format.describe(listing)
    state, faults = _opened(found)
    groups = state.facts.groups if state is not None and state.facts is not None else ()
    scalars = state.facts.scalars if state is not None and state.facts is not None else {}
    placements = state.layout.placements if state is not None else {}
    tensors = [(key.kind, place.dtype) for key, place in placements.items() if key.kind != "weight"]
    shapes = {key.name: place.shape for key, place in placements.items() if key.kind == "weight"}
    files = listing.files if isinstance(listing, SavedListing) else {}
    return Inspection(
        format=listing.format if isinstance(listing, SavedListing) else found.format.name,
        writer=listing.writer if isinstance(listing, SavedListing) else found.format.name,
        folder=listing.folder,
        tag=listing.tag,
        dp=state.ranks if state is not None else None,
        states=states_of(tensors, scalars.values()),
        groups=group_entries(((group.members, group.hyperparameters or {}) for group in groups), shapes),
        steps=_steps(state, scalars),
        parameters=tuple(_parameters(state, groups)) if state is not None else (),
        files=tuple(FileEntry(name=name, nbytes=file.nbytes, role=file.role) for name, file in files.items()),
        faults=tuple(faults),
        tp=state.tp if state is not None else None,
        pp=state.pp if state is not None else None,
        ep=state.ep if state is not None else None,
        notes=tuple(state.notes) if state is not None else (),
    )


def _opened(found: Found) -> tuple[Checkpoint | None, list[Fault]]:
    """The checkpoint, where its first files can be opened, and what is wrong with any."""
    try:
        checkpoint = open_checkpoint(found, whole=False)
    except ReshardError as error:
        return None, faults_of(error)
    try:
        checkpoint.open_all()
    except ReshardError as error:
        return checkpoint, faults_of(error)
    return checkpoint, []


def _steps(state: Checkpoint | None, scalars: Mapping[str, Mapping[str, Scalar]]) -> Steps:
    said = dict.fromkeys(plain(kinds["step"], {}) for kinds in scalars.values() if "step" in kinds)
    numbers = (int(step) if isinstance(step, float) and step.is_integer() else step for step in said)
    steps, samples = (state.objects.get((name,)) if state is not None else None for name in (STEPS, SAMPLES))
    return Steps(
        global_steps=steps if isinstance(steps, int) else None,
        global_samples=samples if isinstance(samples, int) else None,
        skipped_steps=None,
        optimizer_steps=tuple(numbers),
    )


def _parameters(state: Checkpoint, groups: tuple[GroupFacts, ...]) -> Iterator[ParameterEntry]:
    """A weight that no param group has may be frozen, or a buffer: no file tells."""
    group_of = {name: number for number, group in enumerate(groups) for name in group.members}
    for key, placement in sorted(state.layout.placements.items()):
        if key.kind == "weight":
            yield ParameterEntry(
                name=key.name,
                shape=placement.shape,
                dtype=placement.dtype.label,
                role="trainable" if len(state.layout.kinds(key.name)) > 1 else "parameter",
                group=group_of.get(key.name),
                tied_to=None,
            )
