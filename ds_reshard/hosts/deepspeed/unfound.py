"""Whether a checkpoint has what a run trains, under which names, and what renames it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.errors import ConfigError, ModelMismatch
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, is_placeholder
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.model.region import Shape
from ds_reshard.operations.name_map import NameMap, read_name_map
from ds_reshard.operations.ranks import rank
from ds_reshard.operations.wrapper_names import patterns

logger = logging.getLogger("ds_reshard")
_BASE_ALONE = """; where all that is trained is new, load the base before deepspeed.initialize, and not here:
ds-reshard convert {folder} OUT --to safetensors
model.load_state_dict(safetensors.torch.load_file("OUT/model.safetensors"), strict=False)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The model of the run: full shapes of trainable, frozen and all state-dict entries."""

    trainable: dict[str, Shape]
    frozen: dict[str, Shape]
    buffers: dict[str, Shape]
    keys: frozenset[str]


def saved_shapes(checkpoint: AnyCheckpoint) -> dict[str, Shape]:
    """Full shapes of everything the checkpoint names, placeholders of stage 3 resolved."""
    saved = checkpoint.model
    shapes = {**saved.frozen_shapes, **saved.trainable}
    for name, tensor in saved.module.items():
        known = shapes.get(saved.shared.get(name, name))
        if known is None or not is_placeholder(tensor, known):
            shapes[name] = tensor.shape
        else:
            shapes[name] = known
    return shapes


def check_trained_names(model: LiveModel, checkpoint: AnyCheckpoint, grid: LiveGrid, *, strict: bool) -> None:
    """Raise ModelMismatch where the checkpoint has none of the parameters that this run trains.

    Also where it is `strict` and has them all under names that wrappers explain. Some are a warning of rank 0.
    """
    shapes = {name: shape for name, shape in saved_shapes(checkpoint).items() if grid.is_responsible_for(name)}
    saved, run = [*shapes, *checkpoint.model.objects], {**model.trainable, **model.frozen, **dict.fromkeys(model.keys)}
    if run.keys() <= set(saved):
        return
    names = patterns(saved, run)
    trained = [name for name, shape in (model.trainable or model.frozen).items() if prod(shape)]
    none = bool(trained) and not any(name in shapes for name in trained)
    asked, kind = trained, "trains"
    if names is not None and shapes.keys() >= set(trained):  # wrappers have renamed what is frozen alone
        asked, kind = [name for name in run if name not in trained], "does not train"
    lacking = [name for name in asked if name not in saved]
    if not lacking:
        return
    left = sorted(name for name in shapes if name not in model.keys)
    mend = "build the model that was saved, or map its names"
    if names is not None:
        mend = f'add "names": {json.dumps(names)} to the "ds_reshard" section of the DeepSpeed JSON'
    elif none and not strict and model.frozen and shapes.keys() >= model.frozen.keys():
        mend += _BASE_ALONE.format(folder=checkpoint.listing.folder)
    what = f"has {len(asked) - len(lacking)} of the {len(asked)} parameters that this run {kind}, by their names"
    shown = f"{', '.join(lacking[:4])}{', ...' if len(lacking) > 4 else ''}"
    there = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}" or "no other names"
    if none or (strict and names is not None):
        raise ModelMismatch.of(checkpoint.listing.folder, what, shown, there, mend=mend)
    if not rank() and not strict:
        said = f"{what}; as they are stay {shown} (in the checkpoint alone: {there})"
        logger.warning("%s %s; %s", checkpoint.listing.folder, said, mend)


@dataclass(frozen=True, slots=True)
class Renaming:
    """What a map of names makes of a model file of DeepSpeed's own; `run` are the names of this run's parameters.

    A folder that has the run's names already, as what this run saves has, stays as it is. `plain` says that names
    stand in model files alone.
    """

    names: NameMap
    run_names: frozenset[str]
    model_files_only: bool

    def __call__(self, model: object) -> object:
        if not isinstance(model, ModelStates):
            return model
        held = dict.fromkeys((*model.module, *model.objects, *model.trainable, *model.frozen_shapes))
        new = self._changed_names(model, list(held))
        if not new:
            return model
        if not self.model_files_only:
            what = "is of pipeline, tensor or expert parallelism, or universal, and is not renamed while it is loaded"
            mend = "ds-reshard convert with --names, and load what it writes"
            raise ConfigError.of(model.path, what, mend=mend)  # an unsupported universal folder is left to DeepSpeed
        return model.under(new)

    def _changed_names(self, model: ModelStates, held: list[str]) -> Mapping[str, str]:
        """The names to change: none if the run has all parameters of the folder by the names that are there.

        ConfigError if the map gives such a folder other names of this run, as one that exchanges or shifts them.
        """
        new = self.names.renaming(held, model.shared)
        parameters = {*model.trainable, *model.frozen_shapes} or model.module.keys() - model.buffer_names
        if not self.run_names.issuperset(parameters):
            return new
        if not self.run_names.isdisjoint(new.values()) or any(name in self.names.names for name in new):
            what = "exchanges or shifts names of this run: whether the folder has them already, no file says"
            raise ConfigError.of(self.names.path, what, mend="convert the folder with --names, and leave it out here")
        return {}


def with_names(listing: Listing, run: frozenset[str], names: str | Mapping[str, object] | None) -> Listing:
    """The listing, whose model files are read under the names of a run where a map was given."""
    if names is None:
        return listing
    plain = not (listing.universal or listing.layers or listing.experts or listing.places or len(listing.columns) > 1)
    return replace(listing, rename=Renaming(read_name_map(names), run, plain))
