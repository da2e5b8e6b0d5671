"""The files of a universal checkpoint below its folder `zero`: which there are, and what one of them holds.

As written by deepspeed/checkpoint/ds_to_universal.py (0.19.8): `zero/<parameter>/<state>.pt` is a dict whose `param`
is the whole tensor (`merge_tp_slices`, stages 1 and 2), or the whole tensor flat (`merge_zero3_slices`); `step.pt` is
the step alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ds_reshard.containers.torch_zip import TorchArchive, check_root, open_archive
from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed, damaged, fail
from ds_reshard.model.facts import Scalar, ScalarTensor
from ds_reshard.model.records import TensorRecord

ZERO = "zero"
STEP = "step"
OPTIMIZER_STATE = f"{ZERO}/optimizer_state.pt"
_VALUE_NBYTES = 8192
_PARAM, _VOCABULARY, _EXPERT = "param", "vocab_tensor", "is_expert_param"


def state_file(name: str, kind: str) -> str:
    """The file of one state of one parameter, below the checkpoint's folder."""
    return f"{ZERO}/{name}/{kind}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One state of one parameter: a tensor, or with `tensor` None one value; `keys` are what lies beside the tensor."""

    path: str
    tensor: TensorRecord | None
    scalar: Scalar
    keys: frozenset[str]

    @property
    def stripped(self) -> bool:
        """Whether rows that pad the vocabulary may be missing."""
        return _VOCABULARY in self.keys

    @property
    def from_weights(self) -> bool:
        """Whether it has the form in which ds_to_universal copies the model's weight, for want of a master."""
        return self.keys == {_PARAM}


def list_states(folder: str, names: Iterable[str]) -> tuple[dict[str, dict[str, int]], list[Fault]]:
    """For each parameter its states and their bytes; a fault for each parameter that has no folder."""
    found: dict[str, dict[str, int]] = {}
    faults: list[Fault] = []
    for name in names:
        where = f"{folder}/{ZERO}/{name}"
        if os.path.isabs(name) or ".." in name.split("/"):
            faults.append(damaged(folder, "names a parameter that is no name of a file", "a plain name", repr(name)))
            continue
        try:
            with os.scandir(where) as scan:
                sizes = {e.name: e.stat().st_size for e in scan if e.name.endswith(".pt") and e.is_file()}
        except FileNotFoundError:
            faults.append(_missing_folder(where, name))
            continue
        except OSError as error:
            raise ReadFailed(f"{where}: cannot be listed: {error}") from error
        found[name] = {file.removesuffix(".pt"): sizes[file] for file in sorted(sizes)}
        faults += [
            damaged(f"{where}/{file}", "is empty", "a torch zip file", "0 bytes") for file in sizes if not sizes[file]
        ]
    return found, faults


def _missing_folder(where: str, name: str) -> Fault:
    return CheckpointDamaged.fault(
        where,
        f"parameter {name} was trained, and has no folder here",
        "a folder with its master and states",
        "none",
        mend="convert the checkpoint again, or load the one that it was made from",
    )


def read_state(path: str, kind: str) -> StateFile:
    """Read one file: directory and pickle, and the bytes of what is one value."""
    with open_archive(path) as archive:
        check_root(path, kind, archive.root)
        top = archive.load()
        if isinstance(top, dict):
            tensor = top.get(_PARAM)
            if not isinstance(tensor, TensorRecord):
                raise fail(path, "holds no tensor", f"an entry {_PARAM!r}", f"keys {sorted(map(str, top))[:8]}")
            if top.get(_EXPERT):
                raise fail(path, "is of an expert layer", "a parameter that every rank has", _EXPERT)
            return StateFile(path=path, tensor=tensor, scalar=None, keys=frozenset(map(str, top)))
        if isinstance(top, TensorRecord) and top.shape and kind != STEP:
            return StateFile(path=path, tensor=top, scalar=None, keys=frozenset())
        return StateFile(path=path, tensor=None, scalar=_scalar(path, archive, top), keys=frozenset())


def read_value(path: str, kind: str, known: dict[bytes, StateFile]) -> StateFile:
    """As `read_state`, of a file that holds one value: what was read of equal bytes before is not parsed again.

    torch.save writes equal values into equal files, and every parameter has its own step.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_VALUE_NBYTES + 1)
    except OSError:
        return read_state(path, kind)
    if data not in known:
        found = read_state(path, kind)
        if len(data) > _VALUE_NBYTES:
            return found
        known[data] = found
    return replace(known[data], path=path)


def _scalar(path: str, archive: TorchArchive, value: object) -> Scalar:
    if isinstance(value, TensorRecord) and value.numel == 1 and value.contiguous:
        return ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
    if value is None or isinstance(value, int | float | bool | str):
        return value
    raise fail(path, "is neither a tensor nor one value", "a tensor, or a number", type(value).__name__)
