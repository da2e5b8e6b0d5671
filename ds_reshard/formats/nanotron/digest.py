"""A checksum of what a checkpoint shows of its arrangement, to tell whether another one shows the same."""

from __future__ import annotations

import hashlib

from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.metadata import read_bytes
from ds_reshard.formats.nanotron.names import CONFIG, META, MODEL_CONFIG, OPTIMIZER_CONFIG
from ds_reshard.model.facts import canonical


def digest_of(checkpoint: NanotronCheckpoint) -> str:
    """Of the small files, the headers of weights, names, param groups and schedulers; of no tensor's values."""
    listing = checkpoint.listing
    small = [name for name in (META, CONFIG, MODEL_CONFIG, OPTIMIZER_CONFIG) if name in listing.nbytes]
    said = {
        "files": {name: hashlib.sha256(read_bytes(listing.path(name))).hexdigest() for name in small},
        "weights": {
            name: [
                parameter.shape,
                parameter.dtype.label,
                [list(map(str, pairs)) for pairs in parameter.pairs],
                {rank: tensor.shape for rank, tensor in parameter.files.items()},
            ]
            for name, parameter in checkpoint.parameters.items()
        },
        "homes": dict(listing.weight_stages),
        "stages": [
            {
                "groups": [[group.members, dict(group.hyperparameters)] for group in stage.groups],
                "states": {
                    name: {kind: tensor.dtype.label for kind, tensor in kinds.items()}
                    for name, kinds in stage.states.items()
                },
            }
            for stage in checkpoint.stages
        ],
        "schedulers": [dict(scheduler.entries) for scheduler in checkpoint.schedulers],
    }
    return hashlib.sha256(canonical(said).encode("utf-8", "surrogatepass")).hexdigest()
