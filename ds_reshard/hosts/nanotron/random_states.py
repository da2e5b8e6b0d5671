"""The random states of a rank, read without running anything that the file names.

nanotron pickles its own classes (random.py) and reads them with `torch.load`, which refuses these from torch 2.6 on;
its trainer saves them and loads none (trainer.py, commit 2411b02).
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from ds_reshard.containers.revive import Builder, ReviveChild, revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound, ReshardError, fail
from ds_reshard.execution.whole import read_tensor
from ds_reshard.hosts.nanotron.live import ParallelContext, place_of
from ds_reshard.model.records import GlobalName, ObjectRecord

if TYPE_CHECKING:
    from torch import Tensor

_FIELDS = ("random", "numpy", "torch_cpu", "torch_cuda")


class RandomState(Protocol):
    """`RandomState` of random.py."""

    random: tuple[object, ...]
    numpy: tuple[object, ...]
    torch_cpu: Tensor
    torch_cuda: Tensor | None


def file_of(context: ParallelContext, folder: str) -> str:
    """`save_random_states` of serialize/random.py: the file of this rank's place, which has no context rank in it."""
    topology, rank = place_of(context, zero=True)
    name = f"tp-{rank.tp}-of-{topology.tp}_dp-{rank.dp}-of-{topology.dp}_pp-{rank.pp}-of-{topology.pp}.pt"
    return os.path.join(folder, "random", name)


def load_random_states(arguments: Mapping[str, object]) -> object:
    """nanotron's `RandomStates` of this rank, checked; the states of the process are left as they are.

    Raises CheckpointNotFound where the checkpoint has none of this rank's place.
    """
    context = cast(ParallelContext, arguments["parallel_context"])
    path = file_of(context, str(arguments["root_folder"]))
    if not os.path.exists(path):
        fault = CheckpointNotFound.fault(
            path,
            "does not exist: random states are of the ranks that were saved, and fit no other number of them",
            mend="--no-load-rng, or the topology that was saved",
        )
        raise CheckpointNotFound(f"{fault.line()}; {fault.mend}", [fault])
    return read_random_states(path)


def read_random_states(path: str) -> object:
    """The states of one file; CheckpointDamaged where they are none that this process could take."""
    from nanotron import random as nanotrons

    def states(record: ObjectRecord | GlobalName, child: ReviveChild) -> object:
        held = _state(record).get("_dict")
        found = child(held)
        if not isinstance(found, dict):
            raise TypeError("RandomStates holds no dict")
        return nanotrons.RandomStates(found)

    def state(record: ObjectRecord | GlobalName, child: ReviveChild) -> object:
        held = _state(record)
        return nanotrons.RandomState(**{name: child(held[name]) for name in _FIELDS})

    builders: dict[str, Builder] = {"nanotron.random.RandomStates": states, "nanotron.random.RandomState": state}
    with open_archive(path) as archive:
        top = archive.load()
    found = revive(top, builders=builders, tensor=read_tensor, where=path)
    if not isinstance(found, nanotrons.RandomStates):
        raise fail(path, "holds no random states", "RandomStates of nanotron", type(found).__name__)
    for name, one in found.items():
        _check(path, name, one)
    return found


def restore(live: object, found: object, path: str) -> None:
    """Put what was read into the `RandomStates` that the model's modules share; CheckpointDamaged for other names."""
    mine, read = cast("dict[str, object]", live), cast("dict[str, object]", found)
    if set(mine) != set(read):
        raise fail(
            path, "holds the random states of other names than this run has", str(sorted(mine)), str(sorted(read))
        )
    for name, value in read.items():
        mine[name] = value


def _state(record: ObjectRecord | GlobalName) -> Mapping[object, object]:
    held = record.state if isinstance(record, ObjectRecord) else None
    if not isinstance(held, dict):
        raise TypeError("holds no state")
    return held


def _check(path: str, name: str, one: RandomState) -> None:
    """Give the states to generators of their own: what these take the process takes."""
    import numpy
    import torch

    try:
        random.Random().setstate(one.random)
        numpy.random.RandomState().set_state(one.numpy)  # type: ignore[arg-type]
        torch.Generator().set_state(one.torch_cpu)
        if torch.cuda.is_available() != (one.torch_cuda is not None):
            raise ValueError("a state of CUDA is on one side only")
        if one.torch_cuda is not None:
            torch.Generator("cuda").set_state(one.torch_cuda)
    except ReshardError:
        raise
    except Exception as error:
        raise fail(
            path,
            f"{name} is no state that this process can take ({str(error)[:120]})",
            "random, numpy, torch",
            "others",
        ) from error
