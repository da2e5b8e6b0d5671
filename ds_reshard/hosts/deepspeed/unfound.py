"""Check that a checkpoint has the parameters that a run trains, and rename them if the user gave a map of names."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.containers.digests import note_names
from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, is_placeholder
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.model.region import Shape
from ds_reshard.operations.matching import report_missing
from ds_reshard.operations.name_map import NameMap, read_name_map
from ds_reshard.operations.ranks import rank
from ds_reshard.operations.wrapper_names import patterns

logger = logging.getLogger("ds_reshard")
_BASE_ALONE = """; if all trained parameters are new, load the base model before deepspeed.initialize, and not here:
ds-reshard convert {folder} OUT --to safetensors
model.load_state_dict(safetensors.torch.load_file("OUT/model.safetensors"), strict=False)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The model of the run: full shapes of trainable parameters, frozen parameters and buffers, and all entries.

    `tied` has, for each entry of a tensor that has several, all of them.
    """

    trainable: dict[str, Shape]
    frozen: dict[str, Shape]
    buffers: dict[str, Shape]
    keys: frozenset[str]
    tied: Mapping[str, frozenset[str]]


def saved_shapes(checkpoint: AnyCheckpoint) -> dict[str, Shape]:
    """Return the full shapes of all names in the checkpoint; the empty placeholders of stage 3 are resolved."""
    saved = checkpoint.model
    shapes = {**saved.frozen_shapes, **saved.trainable}
    for name, tensor in saved.module.items():
        full_shape = shapes.get(saved.shared.get(name, name))
        if full_shape is None or not is_placeholder(tensor, full_shape):
            shapes[name] = tensor.shape
        else:
            shapes[name] = full_shape
    return shapes


def check_trained_names(model: LiveModel, checkpoint: AnyCheckpoint, grid: LiveGrid, *, strict: bool) -> None:
    """Raise ModelMismatch if the checkpoint has none of the parameters that this run trains, by their names.

    With `strict`, also raise if it lacks some, and wrappers (such as LoRA) explain the difference in names. Without it,
    rank 0 warns of missing ones.
    """
    shapes = {name: shape for name, shape in saved_shapes(checkpoint).items() if grid.is_responsible_for(name)}
    saved, run = [*shapes, *checkpoint.model.objects], {**model.trainable, **model.frozen, **dict.fromkeys(model.keys)}
    if run.keys() <= set(saved):
        return
    names = patterns(saved, run)
    trained = [name for name, shape in (model.trainable or model.frozen).items() if prod(shape)]
    has_none = bool(trained) and not any(name in shapes for name in trained)
    expected, verb = trained, "trains"
    if names is not None and shapes.keys() >= set(trained):  # wrappers have renamed only frozen parameters
        expected, verb = [name for name in run if name not in trained], "does not train"
    missing = [name for name in expected if name not in saved]
    if not missing:
        return
    unused = sorted(name for name in shapes if name not in model.keys)
    mend = "build the model that was saved, or map its names"
    if names is not None:
        mend = f'add "names": {json.dumps(names)} to the "ds_reshard" section of the DeepSpeed JSON'
    elif has_none and not strict and model.frozen and shapes.keys() >= model.frozen.keys():
        mend += _BASE_ALONE.format(folder=checkpoint.listing.folder)
    what = f"has {len(expected) - len(missing)} of the {len(expected)} parameters that this run {verb}, by their names"
    refuse, where = has_none or (strict and names is not None), checkpoint.listing.folder
    report_missing(where, what, missing, unused, mend=mend, refuse=refuse, warn=not rank() and not strict)


def warn_of_others(model: LiveModel, checkpoint: AnyCheckpoint, grid: LiveGrid) -> None:
    """Name on rank 0 what a load that is not strict leaves out of the checkpoint, and what keeps its values in the run.

    Those are parameters, buffers and extra states; `check_trained_names` names trained parameters that are missing.
    """
    saved, keys = {*saved_shapes(checkpoint), *checkpoint.model.objects}, model.keys
    saved = {name for name in saved if grid.is_responsible_for(name)}
    lacking = [name for name in keys - saved if model.tied.get(name, {name}).isdisjoint(saved | model.trainable.keys())]
    for names, what in (
        (saved - keys, "has entries that this run's model has not, and they are left out"),
        (lacking, "lacks entries of this run's model, and they keep their values"),
    ):
        if names and not rank():
            shown = f"{', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''}"
            logger.warning("%s %s (%d): %s", checkpoint.listing.folder, what, len(names), shown)


@dataclass(frozen=True, slots=True)
class Renaming:
    """Renames the tensors of DeepSpeed's model files by a map; `run_names` are the names of this run's parameters.

    A folder that already has the run's names, as this run saves them, is not renamed. `model_files_only` is true if no
    other files contain names.
    """

    names: NameMap
    run_names: frozenset[str]
    model_files_only: bool

    def __call__(self, model: object) -> object:
        if not isinstance(model, ModelStates):
            return model
        saved_names = dict.fromkeys((*model.module, *model.objects, *model.trainable, *model.frozen_shapes))
        new_names = self._changed_names(model, list(saved_names))
        if not new_names:
            return model
        if not self.model_files_only:
            what = "is of pipeline, tensor or expert parallelism, or universal, and is not renamed while it is loaded"
            mend = "ds-reshard convert with --names, and load what it writes"
            raise ConfigError.of(model.path, what, mend=mend)  # an unsupported universal folder is left to DeepSpeed
        note_names(sorted(new_names.items()))
        return model.with_names(new_names)

    def _changed_names(self, model: ModelStates, saved_names: list[str]) -> Mapping[str, str]:
        """Return the names to change; none if the run already has all parameters of the folder by their saved names.

        Raises ConfigError if the map then changes names into other names of this run (it exchanges or shifts them).
        """
        new_names = self.names.renaming(saved_names, model.shared)
        parameters = {*model.trainable, *model.frozen_shapes} or model.module.keys() - model.buffer_names
        if not self.run_names.issuperset(parameters):
            return new_names
        if not self.run_names.isdisjoint(new_names.values()) or any(name in self.names.names for name in new_names):
            what = "exchanges or shifts names of this run: no file tells whether the folder was renamed already"
            raise ConfigError.of(self.names.path, what, mend="convert the folder with --names, and leave it out here")
        return {}


def with_names(listing: Listing, run: frozenset[str], names: str | Mapping[str, object] | None) -> Listing:
    """Return the listing, whose model files are renamed when they are read if the user gave a map of names."""
    names_map = read_name_map(names) if names is not None else None
    if not isinstance(names_map, NameMap):
        return listing
    plain = not (listing.universal or listing.layers or listing.experts or listing.ep_optim or len(listing.columns) > 1)
    return replace(listing, rename=Renaming(names_map, run, plain))
