"""One optimizer file of a nanotron checkpoint: names, states, masters and param groups.

`NamedOptimizer.state_dict` (optim/named_optimizer.py) adds `names`, which are of this file: under ZeRO-1 a parameter
with fewer elements than ranks is missing on some, and the numbers of those behind it shift. A master lies in
`gradient_accumulator` (optim/gradient_accumulator.py), a view of a buffer of all of them (commit 2411b02).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import basename

from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import fail
from ds_reshard.model.facts import Scalar, ScalarTensor, number_of
from ds_reshard.model.records import TensorRecord

MASTER = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A param group: the members that this rank has a part of, and the hyper-parameters.

    `stateless` counts members that have no state and so no name: frozen ones, which ZeRO-0 leaves in their group.
    """

    members: tuple[str, ...]
    hyperparameters: Mapping[str, object]
    stateless: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFile:
    """What one file says; `states` has of each parameter its tensors by kind, in the file's order."""

    path: str
    states: Mapping[str, Mapping[str, TensorRecord]]
    scalars: Mapping[str, Mapping[str, Scalar]]
    groups: tuple[SavedGroup, ...]

    @property
    def has_masters(self) -> bool:
        return any(MASTER in kinds for kinds in self.states.values())

    @property
    def step(self) -> int | float | None:
        """How many steps the optimizer had made: the most of any parameter; None where none is counted."""
        counted = (number_of(values.get("step")) for values in self.scalars.values())
        return max((number for number in counted if number is not None), default=None)


def read_optimizer(path: str) -> OptimizerFile:
    """Read one file: directory, pickle and steps. Raises CheckpointDamaged where it is not what nanotron saves."""
    with open_archive(path) as archive:
        check_root(path, basename(path).removesuffix(".pt"), archive.root)
        top = archive.load()
        entries = top if isinstance(top, dict) else {}
        names, state, groups = (entries.get(key) for key in ("names", "state", "param_groups"))
        if not isinstance(names, dict) or not isinstance(state, dict) or not isinstance(groups, list):
            found = f"entries {sorted(map(str, entries))[:8]}"
            raise fail(path, "is no optimizer file of nanotron", "names, state and param_groups", found)
        if set(names) != set(state) or len(set(names.values())) != len(names):
            raise fail(path, "names and states do not match", f"{len(names)} names, each once", f"{len(state)} states")
        masters = entries.get("gradient_accumulator", {})
        if not isinstance(masters, dict):
            raise fail(path, "gradient_accumulator is no dict", "masters by name", type(masters).__name__)
        if masters and set(masters) != set(names.values()):
            raise fail(path, "masters and states are of other parameters", f"{len(names)}", f"{len(masters)}")
        states: dict[str, dict[str, TensorRecord]] = {}
        scalars: dict[str, dict[str, Scalar]] = {}
        for number, name in names.items():
            if not isinstance(name, str) or not isinstance(state[number], dict):
                raise fail(path, "has a state that is no dict by name", "exp_avg, exp_avg_sq, step", repr(name)[:80])
            states[name], scalars[name] = _split(path, archive, state[number])
            if masters:
                states[name][MASTER] = _whole(path, f"{MASTER} of {name}", masters[name])
    return OptimizerFile(
        path=path, states=states, scalars=scalars, groups=tuple(_group(path, group, names) for group in groups)
    )


def _split(
    path: str, archive: TorchArchive, state: Mapping[object, object]
) -> tuple[dict[str, TensorRecord], dict[str, Scalar]]:
    tensors: dict[str, TensorRecord] = {}
    scalars: dict[str, Scalar] = {}
    for kind, value in state.items():
        if isinstance(value, TensorRecord) and value.shape:
            tensors[str(kind)] = _whole(path, f"state {kind!r}", value)
        elif isinstance(value, TensorRecord):
            scalars[str(kind)] = ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
        elif value is None or isinstance(value, int | float | bool | str):
            scalars[str(kind)] = value
        else:
            raise fail(path, f"state {kind!r} is neither a tensor nor one value", "a tensor", type(value).__name__)
    if MASTER in tensors:
        raise fail(path, f"has a state called {MASTER!r}", "exp_avg, exp_avg_sq, ...", MASTER)
    return tensors, scalars


def _whole(path: str, what: str, value: object) -> TensorRecord:
    if not isinstance(value, TensorRecord) or not value.contiguous:
        raise fail(path, f"{what} is no row-major tensor", "a contiguous tensor", type(value).__name__)
    return value


def _group(path: str, group: object, names: Mapping[object, object]) -> SavedGroup:
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(params, list):
        raise fail(path, "has a param group without members", "a list 'params'", type(group).__name__)
    members = tuple(str(names[number]) for number in params if number in names)
    hyperparameters = {str(key): value for key, value in group.items() if key != "params"}
    return SavedGroup(members=members, hyperparameters=hyperparameters, stateless=len(params) - len(members))
