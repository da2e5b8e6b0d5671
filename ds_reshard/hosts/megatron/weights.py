"""What a checkpoint and a model do not have in common, where Megatron loads: it drops it, or goes on without a word."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ConfigError, Fault, ModelMismatch, raise_faults
from ds_reshard.formats.megatron.flat_states import bucket_numels
from ds_reshard.formats.megatron.torch_dist import is_state, saved_tensors
from ds_reshard.formats.megatron.torch_format import FLAT_FILE
from ds_reshard.hosts.megatron.direct import MODEL, STATES, named_alike
from ds_reshard.hosts.megatron.live import Load
from ds_reshard.hosts.megatron.topology import Saved, missing_file, renumbered
from ds_reshard.operations.matching import OTHER_SHAPE, TENSORS, TRAINED, match_tensors
from ds_reshard.operations.ranks import attempt, broadcast, gather, rank

if TYPE_CHECKING:
    from typing import TypeGuard

    import torch


_BY_NAME = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.")
_LOG = f"{MODEL}, or add --dist-ckpt-strictness log_all to keep its initial value"


def other_tensors(load: Load, asked: Mapping[object, object], strictness: str) -> list[Fault]:
    """A fault for each tensor of a `torch_dist` checkpoint that no rank has, or of a rank that it has not. Collective.

    Megatron reads what is `asked` for, and drops the rest without a word. What the checkpoint has not ends in torch's
    own error where `--dist-ckpt-strictness` is `assume_ok_unexpected`, and stays as built where that logs or ignores
    (core/dist_checkpointing/validation.py, 0.18.2 and 0.19.2). With `--finetune` either is a warning.
    """
    if strictness.startswith("return_"):
        what, mend = "returns more than Megatron-LM's own load_checkpoint takes", "give log_all in its place"
        return [ConfigError.fault(f"--dist-ckpt-strictness {strictness}", what, mend=mend)]
    found, _, _ = attempt(lambda: saved_tensors(load.where) if rank() == 0 else None)  # what is wrong Megatron tells
    there = broadcast(found) or []
    told = gather((_keys(asked), "optimizer" in asked)) if there else []
    own, states = {key for keys, _ in told for key in keys}, any(with_states for _, with_states in told)
    weights, of_states = (
        [{key: None for key in keys if is_state(key) is state} for keys in (own, there)] for state in (False, True)
    )
    faults = match_tensors(*weights, mend=MODEL) if told else []
    by_name = any(map(_BY_NAME.match, there))
    faults = named_alike(faults, weights[0], weights[1], load.where, by_name=by_name)
    lost = match_tensors(*of_states, words=TRAINED, mend=STATES) if states else []
    return warn_of(load, faults + lost, strictness, weights[0]) if load.policy.finetune else faults or lost


def warn_of(load: Load, faults: list[Fault], strictness: str, run: Collection[str]) -> list[Fault]:
    """With `--finetune`, warn of tensors that one side lacks; those that Megatron's strictness refuses stay faults.

    So do all if the checkpoint has none of the weights of this run, whose names are `run`.
    """
    if {one.where for one in faults if one.what == TENSORS[0]}.issuperset(run):
        return faults
    passed = strictness.startswith("log_") or strictness == "ignore_all"
    warned = [one for one in faults if passed or one.what in (TENSORS[1], TRAINED[1])]
    load.warnings += ["; ".join(f"{one.where}: {one.what}" for one in warned)] if warned else []
    return [replace(one, mend=_LOG) if one.mend == MODEL else one for one in faults if one not in warned]


def _keys(asked: Mapping[object, object]) -> set[str]:
    """The keys of the model's and the optimizer's tensors that this rank asks for."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    own = set[str]()
    for one in nested_values(dict(asked)):
        parts = nested_values({0: one.build()}) if isinstance(one, ShardedTensorFactory) else [one]
        own.update(part.key for part in parts if isinstance(part, ShardedTensor))
    return own


def other_weights(load: Load, state: Mapping[str, object]) -> list[Fault]:
    """What of format `torch` is not the model's own weights by name and shape; with `--finetune` names are a warning.

    Megatron puts in what is of its names and goes on, and stops at another shape when others are in
    (`load_model_state_dict` of training/checkpointing.py, 0.18.2 and 0.19.2: strict, and then not).
    """
    from megatron.core.utils import unwrap_model
    from megatron.training import get_args

    names, shapes, run = list[Fault](), list[Fault](), set[str]()
    models = cast("list[torch.nn.Module]", unwrap_model(load.models))
    for number, model in enumerate(models):
        held = state.get("model" if len(models) == 1 else f"model{number}")
        told = {str(name): one for name, one in held.items() if _is_weight(one)} if isinstance(held, Mapping) else {}
        own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers, kept = dict(model.named_buffers(remove_duplicate=False)), model.state_dict(keep_vars=True)
        own |= {name: one for name, one in buffers.items() if name in kept and _is_weight(one)}
        run |= own.keys()
        known = own | buffers
        kept = {name: one.shape for name, one in told.items() if name in own or name not in known}
        faults = match_tensors({name: one.shape for name, one in own.items()}, kept, mend=MODEL)
        faults = named_alike(faults, own, kept, load.where, by_name=False)
        shapes += [fault for fault in faults if fault.what == OTHER_SHAPE]
        names += [fault for fault in faults if fault.what != OTHER_SHAPE]
    if names and load.policy.finetune and load.found is not None:
        shapes += renumbered(getattr(load.found.arguments, "__dict__", {}), vars(get_args()), load.where)
        names = warn_of(load, names, "ignore_all", run)
    return names + shapes


def _is_weight(value: object) -> TypeGuard[torch.Tensor]:
    return bool(getattr(getattr(value, "dtype", None), "is_floating_point", False))


_FROZEN = "train the parameters that the saving run has trained (requires_grad), or add --no-load-optim"


def other_buffers(saved: Saved, optimizer: object) -> Iterator[Fault]:
    """A fault for each flat buffer of this rank of another size, as of a parameter that one of the runs has frozen.

    Megatron stops there when weights have changed (`load_parameter_state_from_dp_reshardable` and `_from_dp_zero` of
    core/optimizer/distrib_optimizer.py, 0.18.2 and 0.19.2).
    """
    for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        now = [sum(sum(sizes) for sizes in one.values()) for one in getattr(part, "per_bucket_numel_unpadded", ())]
        then = (_bucket_sizes if saved.whole else _buffer_sizes)(saved, part, number) if now else None
        for chunk, sizes in enumerate(zip(then or (), now, strict=False)):
            if sizes[0] != sizes[1]:
                what = f"the optimizer's state of model chunk {chunk} is of other parameters than this run trains"
                counted = [f"{size} elements on this rank" for size in sizes]
                yield ModelMismatch.fault(saved.folder, what, *counted, mend=_FROZEN)


def _bucket_sizes(saved: Saved, part: object, number: int) -> list[int] | None:
    """Elements of each buffer of `torch_dist` with sharding type dp_reshardable, None where that is not told."""
    name = f"optimizer.distributed.dp_group_idx_{getattr(part, 'data_parallel_group_idx', 0)}.per_bucket_numel_unpadded"
    told = (bucket_numels(saved.objects, prefix + name) for prefix in (f"chained_{number}.", ""))
    rows = next((one for one in told if one is not None), None)
    return None if rows is None else [sum(map(sum, one.values())) for one in rows]


def _buffer_sizes(saved: Saved, part: object, number: int) -> list[int]:
    """Elements of each buffer of format `torch`, as far as this rank's file tells."""
    path = str(PurePath(own_file(saved.folder)).with_name(FLAT_FILE))
    raise_faults(missing_file(path), subject=f"loading {saved.folder}")
    with open_archive(path) as archive:
        held = archive.load()
    flat = (held[number] if number < len(held) else None) if isinstance(held, list) else held
    found = list[int]()
    while isinstance(flat, Mapping) and isinstance(flat.get(len(found)), Mapping):
        found.append(sum(one.get("numel_unpadded", 0) for one in flat[len(found)].values()))
    return found


def own_file(folder: str) -> str:
    """The file of format `torch` that this rank's weights are in, of the folder of an iteration."""
    from megatron.training.checkpointing import get_checkpoint_name

    path = PurePath(folder)
    return str(get_checkpoint_name(str(path.parent), int(path.name.removeprefix("iter_"))))
