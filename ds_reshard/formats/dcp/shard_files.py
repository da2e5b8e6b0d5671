"""Weights in a safetensors file of each rank, whose header has the offset of each part; no index lies beside them.

torch's `HuggingFaceStorageWriter` writes them with `save_distributed=True`, which transformers calls in
`save_pretrained(folder, distributed_checkpoint=True)` of a run with a `DistributedConfig`
(torch/distributed/checkpoint/hf_storage.py and _hf_utils.py, 2.13; transformers/distributed/checkpoint.py, 5.24). The
shape of a whole tensor is in no file: it ends where its last part ends.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA, Chunk, Directory, SavedTensor, damaged
from ds_reshard.containers.safetensors import SafetensorsHeader, read_header
from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, UnsupportedLayout, raise_faults
from ds_reshard.formats.dcp.entries import MODELS, tensor_key
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape

_NAME = re.compile(r"shard-\d{5}-model-\d{5}-of-(\d{5})\.safetensors")
_VERSION, _PARTS = "DCP_VERSION", "DCP_SHARDING_INFO"
_TESTED = "1.0"
MEND = (
    "move the files that the last save did not write out of the folder (an earlier one by more ranks leaves some), "
    "restore what is missing from a copy, or load another checkpoint"
)


def shard_names(folder: str) -> list[str]:
    """The files of weights, sorted by rank; none for a folder that is of another kind."""
    return sorted(name for name in folders.names(folder) if _NAME.fullmatch(name))


def optimizer_parts(folder: str) -> list[str]:
    """Return the folder of torch.distributed.checkpoint with the optimizer, "" for this one, in a list, or none.

    `save_optimizer_distributed` writes it where the script says: here it is found in the folder, or right below it.
    Raises UnsupportedLayout for several.
    """
    below = [name for name, nbytes in folders.entries(folder).items() if nbytes is None]
    parts = [part for part in ("", *sorted(below)) if folders.is_file(os.path.join(folder, part, METADATA))]
    if len(parts) > 1:
        what = "holds several folders of torch.distributed.checkpoint, and nothing tells which is its optimizer's"
        found = ", ".join(part or "." for part in parts)
        fault = UnsupportedLayout.fault(folder, what, "one", found, mend="move all but one of them out of the folder")
        raise_faults([fault], subject=f"checkpoint {folder}")
    return parts


def is_tied(folder: str) -> bool:
    """True if transformers' configuration beside the files says that the model's embeddings are its head, too."""
    try:
        config = folders.read_json(os.path.join(folder, "config.json"))
    except (ReshardError, ValueError):
        return False
    return isinstance(config, dict) and config.get("tie_word_embeddings") is True


def read_shards(folder: str) -> Directory:
    """Read the headers of all shard files, and join the parts of each tensor into one directory.

    Raises UnsupportedLayout for an unknown version, CheckpointDamaged, and what reading a file raises.
    """
    faults: list[Fault] = []
    chunks: dict[str, list[Chunk]] = {}
    names = shard_names(folder)
    counts = sorted({match[1] for match in map(_NAME.fullmatch, names) if match is not None})
    if len(counts) > 1:
        fault = damaged(folder, "holds files of several saves, by the numbers in their names", "one", ", ".join(counts))
        faults.append(fault)
    for path in (os.path.join(folder, name) for name in names):
        header = read_header(path)
        if (version := header.metadata.get(_VERSION)) != _TESTED:
            what = (
                f"its {_VERSION} is not supported: only {_TESTED}, which torch 2.13 and transformers 5.24 save, is read"
            )
            fault = UnsupportedLayout.fault(path, what, _TESTED, str(version), mend="load it with what has saved it")
            faults.append(fault)
            continue
        for name, offset, tensor in _parts(path, header, faults):
            chunks.setdefault(name, []).append(Chunk(offset=offset, size=tensor.shape, place=None, record=tensor))
    raise_faults(faults, subject=f"checkpoint {folder}")
    tensors = {f"{MODELS[0]}.{name}": _whole(folder, name, parts, faults) for name, parts in chunks.items()}
    raise_faults(faults, subject=f"checkpoint {folder}")
    paths = {f"{MODELS[0]}.{name}": (MODELS[0], name) for name in chunks}
    return Directory(path=folder, tensors=tensors, objects={}, paths=paths)


def _parts(path: str, header: SafetensorsHeader, faults: list[Fault]) -> Iterator[tuple[str, Shape, TensorRecord]]:
    """Each tensor of a file with its offset in the whole; `faults` gets those that have none."""
    try:
        entries = json.loads(header.metadata.get(_PARTS, ""))
    except (ValueError, RecursionError):
        entries = None
    for name, tensor in header.tensors.items():
        entry = entries.get(name) if isinstance(entries, dict) else None
        offset = entry.get("saved_offsets") if isinstance(entry, dict) else None
        numbers = tuple(at for at in offset if type(at) is int and at >= 0) if isinstance(offset, list) else None
        if numbers is None or not len(numbers) == len(offset or ()) == len(tensor.shape):
            what, expected = f"{name} has no offset in {_PARTS}", f"{len(tensor.shape)} numbers"
            faults.append(damaged(path, what, expected, str(offset)))
        else:
            yield name, numbers, tensor


def _whole(folder: str, name: str, parts: list[Chunk], faults: list[Fault]) -> SavedTensor:
    """The tensor of these parts; `faults` gets one whose parts differ in type or in their number of dimensions."""
    kinds = {(part.record.dtype, len(part.size)) for part in parts if part.record is not None}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype.label} of {axes} dimensions" for dtype, axes in kinds))
        faults.append(CheckpointDamaged.fault(folder, f"{name}: its parts differ", "one type", found, mend=MEND))
    ends = [[at + size for at, size in zip(part.offset, part.size, strict=True)] for part in parts]
    shape = tuple(map(max, zip(*ends, strict=False)))
    return SavedTensor(shape=shape, dtype=next(iter(kinds))[0].label, chunks=tuple(parts))


def unlike_states(directory: Directory) -> Iterator[Fault]:
    """Yield a fault for each optimizer state whose weight is missing or of another shape: a rank's file may be lost."""
    keys = {family: tensor_key(directory.paths.get(family, (family,))) for family in directory.tensors}
    weights = {key.name: directory.tensors[family].shape for family, key in keys.items() if key.kind == WEIGHT}
    for family, key in keys.items():
        shape = directory.tensors[family].shape
        if key.kind != WEIGHT and (key.name not in weights or shape not in ((), weights[key.name])):
            found = str(list(weights[key.name])) if key.name in weights else "no such weight"
            what = f"{key} is of another model than the weights, or a rank's file of these is missing"
            yield CheckpointDamaged.fault(directory.path, what, str(list(shape)), found, mend=MEND)
