"""What one process of plain PyTorch leaves: the weights in Hugging Face's files, `Optimizer.state_dict()` beside them.

Weights are `pytorch_model.bin` or `model.safetensors`, or shards of one of them with their index, as transformers'
`save_pretrained` and DeepSpeed's zero_to_fp32.py name them (5.23, 0.19.8). The optimizer is `optimizer.pt` (Hugging
Face's Trainer) or `optimizer.bin` (accelerate), the scheduler `scheduler.pt` or `scheduler.bin`. An optimizer numbers
its parameters (torch/optim/optimizer.py, 2.13): which number is which is told by `param_names` of its groups, where it
was built of `named_parameters()`; else by `optimizer_names.json`, a list; else by shapes, where no two are alike and
every parameter has states of its own. Gathered from FSDP (FULL_STATE_DICT) it names them instead, and weights are
`pytorch_model_fsdp.bin` where nothing else is there (accelerate/utils/fsdp_utils.py, 1.15).

Of two files for one thing none is taken; of all other files no more than the step of Trainer's `trainer_state.json`
(`TrainerState.global_step`, transformers/trainer_callback.py, 5.23), and what is left out is told.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ds_reshard.containers import folders
from ds_reshard.containers.safetensors import read_header
from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, error_of, fail, raise_faults
from ds_reshard.model.checkpoint import SavedFile, SavedListing, SavedState
from ds_reshard.model.content import MASTER, RENAME, SCHEDULER, STEPS, WEIGHT, Path, flatten, weight_name_fault
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, ScalarTensor, number_of
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box

OPTIMIZERS, SCHEDULERS = ("optimizer.pt", "optimizer.bin"), ("scheduler.pt", "scheduler.bin")
NAMES = "optimizer_names.json"
TRAINER = "trainer_state.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_GATHERED = "pytorch_model_fsdp.bin"
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
# A folder with one of these is another checkpoint's: Trainer and accelerate keep weights beside those of DeepSpeed.
_OTHERS = ("latest", ".metadata", "zero_to_fp32.py", "pytorch_model_fsdp_0")
_INDEX_NBYTES = 1 << 28
# Of torch's own (torch/optim/_adafactor.py, 2.13) and of transformers' (optimization.py, 5.23).
_FACTORED = ("row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col")
_NUMBERED = ("params", "param_names")
_WHOLE = "save the whole state dict of the optimizer"
_LIST = "write a JSON list of the parameters' names, in the order of their numbers, into"


def list_pytorch(folder: str) -> SavedListing | None:
    """The files of such a folder, None for any other."""
    names = set(folders.names(folder))
    if names.isdisjoint((*_WEIGHTS, *_INDEXES, _GATHERED)) or not names.isdisjoint(_OTHERS):
        return None
    files = {}
    for name, nbytes in folders.files(folder).items():
        model = name.endswith((".safetensors", ".bin")) and name.startswith(("model", "pytorch_model"))
        role = "model" if model else "optimizer" if name in OPTIMIZERS else "other"
        files[name] = SavedFile(nbytes=nbytes, role=role)
    return SavedListing(format="plain PyTorch", writer="torch", folder=folder, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class PytorchCheckpoint(SavedState):
    """Everything by name; a family of shards is one file, which has one shard."""

    extents: Mapping[str, Mapping[str, Extent]]
    ranks: int | None = 1

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The tensors of a file by their keys."""
        return self.extents[family]


def open_pytorch(folder: str, *, optimizer: bool = True) -> PytorchCheckpoint:
    """Read headers and pickles. Raises, with every reason, for files that are missing, damaged or not proved.

    Each number of the optimizer is proved: states are of the shape of the weight that it is said to be.
    """
    found: dict[str, dict[TensorKey, TensorRecord]] = {}
    notes: list[str] = []
    left_out: list[str] = []
    for name, tensors in _weights(folder, notes, left_out):
        found[name] = {TensorKey(name=key, kind=WEIGHT): tensor for key, tensor in tensors.items()}
    weights = {key.name: tensor for tensors in found.values() for key, tensor in tensors.items()}
    facts, objects = None, dict(_scheduler(folder))
    file = _single(folder, OPTIMIZERS, "states of the optimizer") if optimizer else None
    if file is not None:
        facts, found[file] = _optimizer(folder, file, weights)
    notes += _clock(folder, facts, objects)
    objects |= _iteration(folder, facts, left_out)
    left_out += _others(folder, found) if optimizer else ()
    placements: dict[TensorKey, Placement] = {}
    extents: dict[str, dict[str, Extent]] = {}
    for name, held in found.items():
        for key, tensor in held.items():
            if not tensor.contiguous:
                what = f"{key} does not lie row-major in the file"
                mend = "save contiguous tensors"
                raise error_of([UnsupportedLayout.fault(f"{folder}/{name}", what, mend=mend)], subject=folder)
            boxes = [Box.whole(tensor.shape)]
            placements[key] = chunked_placement(key, tensor.shape, tensor.dtype, boxes, family=name, buffer=str(key))
            extents.setdefault(name, {})[str(key)] = extent_of(tensor)
    layout = Layout(placements, dict.fromkeys(extents, 1))
    return PytorchCheckpoint(
        folder=folder,
        layout=layout,
        facts=facts,
        objects=objects,
        extents=extents,
        notes=tuple(notes),
        left_out=tuple(left_out),
    )


def _single(folder: str, names: Sequence[str], what: str) -> str | None:
    """The one of these files that is there, None for none; nothing tells which of two is meant."""
    found = [name for name in names if folders.is_file(os.path.join(folder, name))]
    if len(found) > 1:
        said = f"holds {what} in several files, and nothing tells which are meant"
        mend = "move all but one of them out of the folder"
        fault = UnsupportedLayout.fault(folder, said, "one file", ", ".join(found), mend=mend)
        raise error_of([fault], subject=f"checkpoint {folder}")
    return found[0] if found else None


def _iteration(folder: str, facts: OptimizerFacts | None, left_out: list[str]) -> dict[Path, object]:
    """The step that Hugging Face's Trainer has counted; one of the optimizer's own that differs is told."""
    path = os.path.join(folder, TRAINER)
    told = _json(path) if folders.is_file(path) else None
    step = told.get("global_step") if isinstance(told, dict) else None
    if type(step) is not int or step < 0:
        return {}
    left_out.append(f"of {TRAINER} its global_step, {step}, alone is taken, where the output has a place for a step")
    counted = [states["step"] for states in facts.scalars.values() if "step" in states] if facts is not None else []
    steps = sorted({str(number_of(value)) for value in counted} - {str(step), str(float(step))})
    if steps:
        left_out.append(f"{TRAINER} says step {step}, and the optimizer {', '.join(steps[:4])}: each is kept as it is")
    return {(STEPS,): step}


def _clock(folder: str, facts: OptimizerFacts | None, objects: Mapping[Path, object]) -> Iterator[str]:
    """A note on a scheduler that accelerate has stepped once for each of several processes (scheduler.py, 1.15).

    Each process leaves its random states (checkpointing.py). A scheduler that a script steps itself, by updates or
    epochs, is never ahead of the optimizer; the Trainer's own counts updates.
    """
    processes = sum(name.startswith("random_states_") for name in folders.names(folder))
    position = objects.get((SCHEDULER, "last_epoch"))
    scalars = facts.scalars.values() if facts is not None else ()
    steps = [step for states in scalars if (step := number_of(states.get("step"))) is not None]
    if processes > 1 and type(position) is int and position > max(steps, default=0):
        made = max(steps) if steps else "an unknown number of"
        yield (
            f"the scheduler's position, {position}, counts the steps of {processes} processes, as accelerate steps: "
            f"the optimizer has made {made} updates: move scheduler.bin out of the folder, and begin the schedule there"
        )


def _others(folder: str, found: Iterable[str]) -> Iterator[str]:
    """A note on all that lies in the folder and is not read."""
    known = {*found, *_INDEXES, *SCHEDULERS, NAMES, TRAINER, "ds_reshard.json"}
    names = [name for name in folders.names(folder) if name not in known]
    if names:
        yield f"left out, as nothing here reads them: {', '.join(names)}"
    if "scaler.pt" in names:
        yield "scaler.pt is the loss scale of an fp16 run: where DeepSpeed's files need one, they say 1"


def _json(path: str) -> object:
    try:
        return folders.read_json(path, _INDEX_NBYTES)
    except ValueError as error:
        raise CheckpointDamaged(f"{path}: is not JSON: {error}") from None


def _weights(folder: str, notes: list[str], left_out: list[str]) -> Iterator[tuple[str, dict[str, TensorRecord]]]:
    """The tensors of each file of weights, all of them those that the index lists."""
    index = _single(folder, (*_WEIGHTS, *_INDEXES), "weights") or _GATHERED
    if index in (*_WEIGHTS, _GATHERED):
        yield index, _tensors(f"{folder}/{index}", notes, left_out)
        return
    told = _json(f"{folder}/{index}")
    located = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(located, dict) or not all(isinstance(name, str) for name in located.values()):
        raise fail(f"{folder}/{index}", "is no index of weights", "'weight_map' of names and files", "another value")
    for name in dict.fromkeys(located.values()):
        if os.path.basename(name) != name or not folders.is_file(f"{folder}/{name}"):
            raise fail(f"{folder}/{index}", "lists a file that is not there", name, "no such file")
        tensors = _tensors(f"{folder}/{name}", notes, left_out)
        wanted = {key for key, place in located.items() if place == name}
        if wanted != set(tensors):
            differ = ", ".join(sorted(wanted ^ set(tensors))[:4])
            raise fail(f"{folder}/{name}", f"does not hold what {index} says", f"{len(wanted)} tensors", differ)
        yield name, tensors


def _tensors(path: str, notes: list[str], left_out: list[str]) -> dict[str, TensorRecord]:
    if path.endswith(".safetensors"):
        return dict(read_header(path).tensors)
    with open_archive(path) as archive:
        tree = archive.load()
    if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict):
        beside = sorted(str(name) for name in tree if name != "state_dict")
        if beside:
            left_out.append(f"left out of {os.path.basename(path)}, beside its state_dict: {', '.join(beside)}")
        tree = tree["state_dict"]
    if not isinstance(tree, dict):
        raise fail(path, "is no state dict", "a dict of tensors", type(tree).__name__)
    _refuse_alike(path, tree)
    others = sorted(str(name) for name, value in tree.items() if not isinstance(value, TensorRecord))
    if others:
        notes.append(f"{os.path.basename(path)}: {', '.join(others[:4])} are no tensors, and are left out")
    return {str(name): value for name, value in tree.items() if isinstance(value, TensorRecord)}


def _refuse_alike(where: str, keys: Iterable[object]) -> None:
    """Raise for keys that are one name here, as 1 and "1" are."""
    counted = Counter(map(str, keys))
    faults = [
        UnsupportedLayout.fault(where, f"several of its keys are {name!r} as a text", "one", str(count), mend=RENAME)
        for name, count in counted.items()
        if count > 1
    ]
    raise_faults(faults, subject=f"checkpoint {os.path.dirname(where)}")


def _scheduler(folder: str) -> Iterator[tuple[Path, object]]:
    file = _single(folder, SCHEDULERS, "states of a scheduler")
    if file is not None:
        with open_archive(f"{folder}/{file}") as archive:
            yield from flatten({SCHEDULER: archive.load()})


def _optimizer(
    folder: str, file: str, weights: Mapping[str, TensorRecord]
) -> tuple[OptimizerFacts, dict[TensorKey, TensorRecord]]:
    """Groups and counters, and the states of each parameter."""
    path = f"{folder}/{file}"
    with open_archive(path) as archive:
        tree = archive.load()
        states, groups = (tree.get("state"), tree.get("param_groups")) if isinstance(tree, dict) else (None, None)
        if not isinstance(states, dict) or not isinstance(groups, list) or not all(map(_is_group, groups)):
            raise fail(path, "is no state dict of an optimizer", "'state' and 'param_groups'", type(tree).__name__)
        names = _names(folder, path, groups, weights, states)
        faults: list[Fault] = []
        tensors: dict[TensorKey, TensorRecord] = {}
        scalars: dict[str, dict[str, Scalar]] = {}
        for number, kinds in states.items():
            if number not in names:
                what = f"parameter {number} has states, and is in no param group"
                faults.append(CheckpointDamaged.fault(path, what, mend=_WHOLE))
            elif not isinstance(kinds, dict):
                what = f"the states of parameter {number}, {names[number]}, are no dict"
                faults.append(UnsupportedLayout.fault(path, what, "a dict", type(kinds).__name__, mend=_WHOLE))
            else:
                name = names[number]
                _refuse_alike(path, kinds)
                faults += _unproved(path, number, name, kinds, weights[name])
                single = {str(kind): value for kind, value in kinds.items() if _is_single(value, kind, weights[name])}
                if single:
                    scalars[name] = {kind: _read(archive, value) for kind, value in single.items()}
                for kind, value in kinds.items():
                    if isinstance(value, TensorRecord) and str(kind) not in single:
                        tensors[TensorKey(name=name, kind=str(kind))] = value
        raise_faults(faults, subject=f"checkpoint {folder}")
        told = []
        for group in groups:
            values = {key: _read(archive, value) for key, value in group.items() if key not in _NUMBERED}
            told.append(GroupFacts(members=tuple(names[one] for one in group["params"]), hyperparameters=values))
    return OptimizerFacts(groups=tuple(told), scalars=scalars), tensors


def _is_group(group: object) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


def _is_single(value: object, kind: object, weight: TensorRecord) -> bool:
    """Whether a state is one value for the parameter, as its step is."""
    if isinstance(value, TensorRecord):
        return value.shape == () and (kind == "step" or weight.shape != ())
    return isinstance(value, int | float | str | None)


def _read(archive: TorchArchive, value: object) -> Scalar:
    if isinstance(value, TensorRecord) and value.numel == 1:
        return ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))
    return cast("Scalar", value)  # a hyper-parameter may be of any plain type


def _names(
    folder: str,
    path: str,
    groups: Sequence[Mapping[str, list[object]]],
    weights: Mapping[str, TensorRecord],
    states: Mapping[object, object],
) -> dict[object, str]:
    """Which parameter each number is."""
    numbers = [number for group in groups for number in group["params"]]
    told: list[object] = [name for group in groups for name in group.get("param_names", ())]
    where, listed = path, os.path.join(folder, NAMES)
    if not told and folders.is_file(listed):
        read, where = _json(listed), listed
        told = [*read] if isinstance(read, list) else []
    elif not told and all(isinstance(one, str) for one in numbers):
        told = numbers  # FSDP.optim_state_dict and get_state_dict of torch
    elif not told and len(groups) == 1:
        floats = [name for name, weight in weights.items() if weight.dtype.label.startswith(("float", "bfloat"))]
        pairs = [(states.get(number), weights[name]) for number, name in zip(numbers, floats, strict=False)]
        apart = len({weights[name].shape for name in floats}) == len(floats) == len(numbers)
        told = [*floats] if apart and all(_proves(held, weight) for held, weight in pairs) else []
    given = set(map(str, told))
    if not len(set(map(str, numbers))) == len(numbers) == len(told) == len(given) or not given <= set(weights):
        what = "does not tell which parameter is which: its groups have no names, and shapes do not tell them apart"
        expected, found = f"{len(numbers)} names of weights", f"{len(told)} names"
        fault = UnsupportedLayout.fault(where, what, expected, found, mend=f"{_LIST} {listed}")
        raise error_of([fault], subject=f"checkpoint {folder}")
    return dict(zip(numbers, map(str, told), strict=True))


def _proves(states: object, weight: TensorRecord) -> bool:
    """Whether the shapes of a number's states can prove that they are a weight's: a scalar is of any weight.

    Tensors of another shape do not: they are told apart from these by `_unproved`.
    """
    values = [value for kind, value in states.items() if kind != "step"] if isinstance(states, dict) else []
    return bool(values) and all(
        isinstance(value, TensorRecord) and (value.shape != () or weight.shape == ()) for value in values
    )


def _unproved(
    path: str, number: object, name: str, kinds: Mapping[object, object], weight: TensorRecord
) -> Iterator[Fault]:
    """States that cannot be those of the weight, or have the name of one."""
    for kind, value in kinds.items():
        shape = value.shape if isinstance(value, TensorRecord) else None
        if str(kind) in (MASTER, WEIGHT):
            yield weight_name_fault(path, f"{name}: {kind}")
        elif not _is_single(value, kind, weight) and shape != weight.shape:
            what = f"parameter {number} is not {name}: its {kind} is of another shape"
            mend = f"{_LIST} {NAMES} beside it"
            if kind in _FACTORED:
                what = f"{name}: its {kind} is a factored state of Adafactor, of rows or columns: it is not carried"
                mend = f"move {os.path.basename(path)} out of the folder, for the weights; or resume it with torch"
            found = str(list(shape)) if shape is not None else type(value).__name__
            yield UnsupportedLayout.fault(path, what, str(list(weight.shape)), found, mend=mend)
