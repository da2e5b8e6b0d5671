"""The learning-rate scheduler's files: `LambdaLR.state_dict()` of each rank, with a rate for each of its param groups.

`save_lr_scheduler` (serialize/optimizer.py, commit 2411b02); nanotron's lambdas are `functools.partial`, of which
torch keeps an empty dict. Up to November 2024 world rank 0 wrote one file for all, with the groups of its own stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import basename

from ds_reshard.containers.torch_zip import check_root, open_archive
from ds_reshard.errors import Fault, damaged, fail
from ds_reshard.formats.nanotron.names import NanotronListing, Rank
from ds_reshard.formats.nanotron.optimizer_file import SavedGroup
from ds_reshard.model.content import BASE, LAMBDAS, LAST, PER_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScheduler:
    """One file: `entries` are all of it, `counters` those that are alike on all ranks."""

    path: str
    entries: Mapping[str, object]

    @property
    def counters(self) -> dict[str, object]:
        return {key: value for key, value in self.entries.items() if key not in PER_GROUP}

    def of_group(self, number: int) -> dict[str, object]:
        """What it keeps of the param group of that number."""
        found = {}
        for key in PER_GROUP:
            values = self.entries[key]
            assert isinstance(values, list)
            found[key] = values[number]
        return found


def read_scheduler(path: str, groups: int | None) -> SavedScheduler:
    """Read one file; CheckpointDamaged where it is no LambdaLR's, or not of that many param groups."""
    with open_archive(path) as archive:
        check_root(path, basename(path).removesuffix(".pt"), archive.root)
        top = archive.load()
    if not isinstance(top, dict) or not all(isinstance(top.get(key), list) for key in PER_GROUP):
        found = ", ".join(sorted(map(str, top))[:8]) if isinstance(top, dict) else type(top).__name__
        raise fail(path, "is no state of a LambdaLR", ", ".join(PER_GROUP), found)
    sizes = {len(values) for key, values in top.items() if key in PER_GROUP}
    if len(sizes) > 1 or (groups is not None and sizes != {groups}):
        raise fail(path, "is of another number of param groups than the optimizer", f"{groups}", f"{sorted(sizes)}")
    return SavedScheduler(path=path, entries={str(key): value for key, value in top.items()})


def scheduler_of(listing: NanotronListing, groups: Sequence[Sequence[SavedGroup]]) -> list[SavedScheduler]:
    """The scheduler of each pipeline stage; none where it was not saved. `groups` are the param groups of each.

    Where one file was written for all, the rates of the other stages are those of their param groups.
    """
    if not listing.schedulers or not groups:
        return []
    first = Rank(pp=0, tp=0, dp=0)
    if len(listing.schedulers) == 1 and len(groups) > 1:
        one = read_scheduler(listing.path(listing.schedulers[first]), len(groups[0]))
        return [one, *(_expanded(one, of_stage) for of_stage in groups[1:])]
    found = []
    for pp, of_stage in enumerate(groups):
        name = listing.schedulers.get(Rank(pp=pp, tp=0, dp=0))
        if name is None:
            what = "has no scheduler of a pipeline rank"
            raise fail(f"{listing.folder}/lr_scheduler", what, f"that of rank {pp}", f"{len(listing.schedulers)} files")
        found.append(read_scheduler(listing.path(name), len(of_stage)))
    return found


def of_another_step(schedulers: Sequence[SavedScheduler], groups: Sequence[Sequence[SavedGroup]]) -> Iterator[Fault]:
    """A scheduler whose last rates are not those that it had put into the param groups when both were saved."""
    for saved, of_stage in zip(schedulers, groups, strict=False):
        for number, group in enumerate(of_stage):
            last, rate = saved.of_group(number)[LAST], group.hyperparameters.get("lr")
            if isinstance(rate, int | float) and last != rate:
                names = ", ".join(group.members[:3]) or f"param group {number}"
                what = f"is of another step than the optimizer's files: the last learning rate of {names} is another"
                yield damaged(saved.path, what, str(rate), str(last)[:80])
                break


def _expanded(one: SavedScheduler, groups: Sequence[SavedGroup]) -> SavedScheduler:
    rates = [group.hyperparameters for group in groups]
    if any("initial_lr" not in rate for rate in rates):
        raise fail(
            one.path, "is of the first pipeline stage, and the groups of another have no initial_lr", "it", "none"
        )
    entries = {
        **one.entries,
        BASE: [rate["initial_lr"] for rate in rates],
        LAST: [rate["lr"] for rate in rates],
        LAMBDAS: [{} for _ in rates],
    }
    return SavedScheduler(path=one.path, entries=entries)
