"""The saved learning-rate schedule of a ZeRO checkpoint, from its first model file and first optimizer file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_reshard.containers.plain import plain, read_scalars, single_elements
from ds_reshard.errors import fail
from ds_reshard.formats.zero.checkpoint import ANY_TP_RANK, ZeroCheckpoint
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.formats.zero.stage0 import param_groups, torch_optimizer
from ds_reshard.model.checkpoint import Listing as AnyListing
from ds_reshard.model.facts import describe
from ds_reshard.resume.lr_preview import Past
from ds_reshard.resume.schedulers import position_in

_MAX_STEP = 2**53


def read_past(listing: AnyListing) -> Past:
    """Return position, rates, scheduler and configuration as they were saved; nothing of the files is executed.

    Opens two files, and reads no tensor but learning rates that were saved as tensors. Raises what a load raises for
    files that are missing, damaged or of a layout that is refused.
    """
    assert isinstance(listing, Listing)
    checkpoint = open_checkpoint(listing, optimizer=True, tp=ANY_TP_RANK)
    entries = checkpoint.model.entries
    groups = checkpoint.groups if checkpoint.optim is not None else param_groups(torch_optimizer(checkpoint.model))
    state, config = entries.get("lr_scheduler"), entries.get("ds_config")
    if state is not None and not isinstance(state, dict):
        state = {}
    return Past(
        where=listing.folder,
        version=checkpoint.model.version,
        position=_position(checkpoint, state),
        rates=_rates(checkpoint, groups),
        scheduler=None if state is None else tuple(map(str, state)),
        config=config if isinstance(config, dict) else None,
        config_path=config if isinstance(config, str) else None,
        outside=state is None and any("initial_lr" in group for group in groups),
    )


def _position(checkpoint: ZeroCheckpoint, state: Mapping[str, object] | None) -> int:
    """Return the scheduler's position; without one, the number of updates: steps except those that overflowed."""
    position = position_in(state) if state is not None else None
    if position is None:
        steps, skipped = (checkpoint.model.entries.get(name, 0) for name in ("global_steps", "skipped_steps"))
        position = steps - skipped if isinstance(steps, int) and isinstance(skipped, int) else None
    if position is None or not 0 <= position < _MAX_STEP:
        raise fail(checkpoint.model.path, "its step count is impossible", "a whole number", describe(position))
    return position


def _rates(checkpoint: ZeroCheckpoint, groups: Sequence[Mapping[str, object]]) -> tuple[float, ...] | None:
    """Return the rate of each param group, or None if one is missing or not a number."""
    if not groups:
        return None
    saved = [group.get("lr") for group in groups]
    path = checkpoint.optimizer_path
    scalars = read_scalars(path, single_elements(saved))
    values = [plain(value, scalars) for value in saved]
    rates = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return tuple(rates) if len(rates) == len(values) else None
