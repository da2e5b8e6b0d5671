"""What a checkpoint says of the learning rates: those of its scheduler's files, and what its config.yaml shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from ds_reshard.errors import Fault, ParamGroupMismatch, UnsupportedLayout, damaged, fail, raise_faults
from ds_reshard.formats.nanotron.checkpoint import open_checkpoint
from ds_reshard.formats.nanotron.metadata import read_metadata
from ds_reshard.formats.nanotron.names import CONFIG, NanotronListing, read_listing
from ds_reshard.formats.nanotron.scheduler import SavedScheduler, read_scheduler
from ds_reshard.model.content import BASE, LAST

_ARGUMENTS = "optimizer.learning_rate_scheduler"
_STEPS = "tokens.train_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRates:
    """Of each param group of this run the base rate and the last one; `position` counts the steps.

    Where the position alone is wanted, there are none. `has_config` says that config.yaml was saved, `iteration` after
    which one the checkpoint was.
    """

    position: int
    iteration: int | None = None
    bases: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    has_config: bool = False


def read_position(folder: str) -> SavedRates:
    """How many steps the saved scheduler had made, without rates. Raises CheckpointDamaged where none was saved."""
    listing = _listed(folder)
    return _made(listing, read_scheduler(listing.path(next(iter(listing.schedulers.values()))), None), (), ())


def read_rates(folder: str, groups: Sequence[Sequence[str]], own: Sequence[str]) -> SavedRates:
    """The rates of this run's groups, by the names of their members.

    Where no file tells the members, they are those of this rank's own file, whose possible names are `own`, or of any
    where all rates are one. Raises CheckpointDamaged where no scheduler was saved or its files differ,
    ParamGroupMismatch where the members of a group had several rates.
    """
    listing = _listed(folder)
    if listing.topology is None or listing.topology.exp != 1 or _cp(listing) > 1 or not all(groups):
        return _by_number(listing, len(groups), own)
    checkpoint = open_checkpoint(listing)
    first = checkpoint.schedulers[0]
    for saved in checkpoint.schedulers:
        if saved.counters != first.counters:
            raise fail(
                saved.path, f"is at another position than {first.path}", str(first.counters), str(saved.counters)
            )
        _floats(saved, BASE)
        _floats(saved, LAST)
    rates, faults = checkpoint.rates, []
    bases: list[float] = []
    last: list[float] = []
    for names in groups:
        held = {(float(str(rates[name][BASE])), float(str(rates[name][LAST]))) for name in names if name in rates}
        if len(held) == 1:
            base, rate = held.pop()
            bases.append(base)
            last.append(rate)
        else:
            faults.append(_several(names, held))
    raise_faults(faults, subject=f"checkpoint {folder}")
    return _made(listing, first, bases, last)


def _by_number(listing: NanotronListing, number: int, own: Sequence[str]) -> SavedRates:
    mine = next((name for name in own if name in listing.nbytes), None)
    one = read_scheduler(listing.path(mine or next(iter(listing.schedulers.values()))), None)
    bases, last = _floats(one, BASE), _floats(one, LAST)
    if len(set(bases)) == 1 and len(set(last)) == 1:
        bases, last = bases[:1] * number, last[:1] * number
    if len(bases) != number or (mine is None and len(set(bases)) > 1):
        raise fail(
            one.path,
            "does not tell the rates of this run's param groups",
            f"{number} groups of this rank",
            f"{len(bases)}",
        )
    return _made(listing, one, bases, last)


def _made(listing: NanotronListing, saved: SavedScheduler, bases: Sequence[float], last: Sequence[float]) -> SavedRates:
    metadata, _ = read_metadata(listing)
    return SavedRates(
        position=_position(saved),
        bases=tuple(bases),
        last=tuple(last),
        has_config=CONFIG in listing.nbytes,
        iteration=metadata.step if metadata is not None else None,
    )


def _listed(folder: str) -> NanotronListing:
    listing = read_listing(folder)
    raise_faults([fault for fault in listing.faults if "/lr_scheduler" in fault.where], subject=f"checkpoint {folder}")
    if not listing.schedulers:
        raise fail(f"{folder}/lr_scheduler", "holds no scheduler", "the file of each rank", "none")
    return listing


def saved_arguments(folder: str, fields: Iterable[str]) -> tuple[object, int]:
    """The arguments and the number of steps that the saving run's scheduler was built for, from its config.yaml."""
    metadata, _ = read_metadata(read_listing(folder))
    texts = metadata.config if metadata is not None else {}
    values = {name: _value(texts[f"{_ARGUMENTS}.{name}"]) for name in fields if f"{_ARGUMENTS}.{name}" in texts}
    steps = _value(texts.get(_STEPS, ""))
    missing = [name for name in fields if name not in values]
    if missing or not isinstance(steps, int):
        fault = UnsupportedLayout.fault(
            f"{folder}/{CONFIG}",
            "does not say how the schedule was shaped, which is in no other file",
            f"{_ARGUMENTS} and {_STEPS}",
            f"no {', '.join(missing) or _STEPS}",
            mend="restore the config.yaml of that run, or leave out the flag that asks for the checkpoint's schedule",
        )
        raise_faults([fault], subject="resuming the schedule")
    assert isinstance(steps, int)
    return SimpleNamespace(**values), steps


def _value(text: str) -> object:
    """A scalar of YAML as nanotron writes it."""
    plain = text.strip("'\"")
    if plain in ("null", "~", ""):
        return None
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return plain


def _cp(listing: NanotronListing) -> int:
    metadata, _ = read_metadata(listing)
    return metadata.cp if metadata is not None else 1


def _floats(saved: SavedScheduler, key: str) -> tuple[float, ...]:
    values = saved.entries[key]
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise fail(saved.path, f"has a {key} that is no list of rates", "numbers", str(values)[:80])
    return tuple(map(float, values))


def _position(saved: SavedScheduler) -> int:
    position = saved.entries.get("last_epoch")
    if type(position) is not int or position < 0:
        raise fail(saved.path, "does not say how many steps it has made", "last_epoch, from 0 on", repr(position)[:80])
    return position


def _several(names: Sequence[str], held: set[tuple[float, float]]) -> Fault:
    if not held:
        return damaged(
            ", ".join(names[:4]) or "a param group without members", "has no saved learning rate", "one", "none"
        )
    return ParamGroupMismatch.fault(
        ", ".join(names[:4]),
        "are in one param group, and had several learning rates",
        "one",
        str(sorted(map(str, held))),
        mend="build the param groups as the saving run did, or --override-opt-param-scheduler",
    )
