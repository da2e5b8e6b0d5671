"""A checkpoint of Megatron-FSDP (`--ckpt-format fsdp_dtensor`) as logical tensors, facts and values.

The folder is one of torch.distributed.checkpoint. `model.*` are the fp32 masters, of which the run's weights are the
cast: no file has other weights. The two halves of SwiGLU, and each expert, are tensors of their own there; here they
are joined to the tensors of `torch_dist`, whose names they get.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ds_reshard.containers.dcp_directory import BUFFER, Chunk, Directory, damaged, list_directory, read_directory
from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.checkpoint import arguments_of, chain_of, counted, objects_of, read_common, read_object
from ds_reshard.formats.megatron.optimizer import read_step
from ds_reshard.formats.megatron.target import Shown, stacks
from ds_reshard.formats.megatron.torch_dist import TorchDist, contradictions, incomplete, without_optimizer
from ds_reshard.formats.megatron.torch_format import LAYER, LOCAL
from ds_reshard.model.checkpoint import SavedListing
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey, Tile, check_cover, tiled_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box

_MEND = "load it with the Megatron-LM that saved it, and save it with --ckpt-format torch_dist"
_MODEL, _STATE, _RANDOM = "model.", "optimizer.state.", "rng_state."
_MODULES = re.compile(r"^(?:module\.)+")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias)\d*)_([wv])")
_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.)(?:local_experts\.(\d{1,9})\.(.+)|(linear_fc[12]\.(?:weight|bias))(\d{1,9}))"
)
_UNKNOWN = re.compile(r"mtp\.|.*(?:\.(?:weight|bias)\.|\.linear_qkv_down_proj\.|_down_proj\.layer_norm_|\.mlp\.\d+\.)")
"""MTP, which is renamed; parts of GDN; projections of MLA and layers of Transformer Engine that are fused otherwise."""


class _Part(NamedTuple):
    """What a key has of a tensor: all of it, that of one expert, or the first or second half of SwiGLU's rows."""

    name: str
    expert: int | None
    half: int | None


class FsdpDtensor(TorchDist):
    """What the files tell; a family of shards are the chunks of all keys of one tensor."""

    @property
    def shown(self) -> Shown:
        return Shown(common=self.common, objects={}, chain=self.chain, stacked=stacks(self.arguments))


def list_fsdp_dtensor(folder: str) -> SavedListing:
    return list_directory(folder, [""], read_directory, format="Megatron-LM, fsdp_dtensor", writer="Megatron-LM")


def open_fsdp_dtensor(folder: str, *, optimizer: bool = True) -> FsdpDtensor:
    """Read the directory and all values; raises every structural fault at once, and what reading damaged files raises.

    `optimizer=False` leaves out the states of the optimizer and its groups.
    """
    subject = f"checkpoint {folder}"
    directory = read_directory(folder) if optimizer else without_optimizer(read_directory(folder))
    raise_faults(list(directory.faults(saved_again=_MEND)), subject=subject)
    common, _ = read_common(folder, directory)
    arguments = arguments_of(common.get("args"))
    if (stages := arguments.get("pipeline_model_parallel_size")) != 1:
        what = "is of several stages of a pipeline, which overwrite each other's layers, or does not tell of how many"
        mend = "save it with --ckpt-format torch_dist, or without pipeline parallelism"
        raise UnsupportedLayout.of(folder, what, "args.pipeline_model_parallel_size 1", str(stages), mend=mend)
    faults: list[Fault] = []
    local = arguments.get("transformer_impl") == "local"
    parts, steps = _parts(directory, local, faults)
    placements: dict[TensorKey, Placement] = {}
    families: dict[str, list[tuple[str, Chunk]]] = {}
    for key, held in parts.items():
        try:
            placements[key] = _joined(directory, key, held, families.setdefault(str(key), []))
        except ValueError as error:
            faults.append(damaged(directory.path, f"{key}: {error}", "each element once", "others"))
    raise_faults(faults, subject=subject)
    faults += contradictions(folder, arguments, placements)
    chain = chain_of(common.get("optimizer"), {}) if optimizer else None
    facts = _facts(chain[0], steps, local) if chain else OptimizerFacts(groups=())
    faults += [*_unlike_others(directory.path, placements, facts), *incomplete(directory.path, placements)]
    raise_faults(faults, subject=subject)
    return FsdpDtensor(
        folder=folder,
        directory=directory,
        layout=Layout(placements, {family: len(held) for family, held in families.items()}),
        facts=facts if chain else None,
        objects=dict(objects_of(common, arguments)),
        chunks=families,
        arguments=arguments,
        replicas={},
        distributed=False,
        flat=False,
        common=common,
        chain=chain,
        ranks=counted(arguments.get("data_parallel_size")),
        left_out=("random states are not read",),
    )


def _part(saved: str, *, local: bool) -> _Part:
    """Translate the name of a tensor into that of `torch_dist`, with its half (`_w`, `_v`) and its expert, if any.

    `local` is true if the layers are Megatron-LM's own, whose norms have other names in `torch_dist`.

    Names from core/transformer/fsdp_dtensor_checkpoint.py, 0.19.2; those of grouped experts were not seen in files.
    """
    name, half, expert = _MODULES.sub("", saved), None, None
    if match := _HALF.fullmatch(name):
        name, half = match[1], "wv".index(match[2])
    if match := _EXPERT.fullmatch(name):
        name, expert = f"{match[1]}experts.{match[3] or match[4]}", int(match[2] or match[5])
    if local and (match := LAYER.fullmatch(name)):
        for own, other in LOCAL.items():
            if match[3].startswith(own):
                name = f"{match[1]}{match[2]}.{other}{match[3].removeprefix(own)}"
    return _Part(name, expert, half)


def _parts(
    directory: Directory, local: bool, faults: list[Fault]
) -> tuple[Mapping[TensorKey, Sequence[tuple[_Part, str]]], Mapping[str, Scalar]]:
    """Return the keys that each tensor is joined of, and the steps that torch's Adam keeps beside its moments."""
    parts: dict[TensorKey, list[tuple[_Part, str]]] = {}
    steps: dict[str, Scalar] = {}
    for saved, tensor in directory.tensors.items():
        name, kind = saved.removeprefix(_MODEL), WEIGHT
        if saved.startswith(_STATE):
            name, _, kind = saved.removeprefix(_STATE).rpartition(".")
        elif not saved.startswith(_MODEL):
            if not saved.startswith(_RANDOM):
                what = f"{saved} is no tensor of the model or its optimizer"
                faults.append(UnsupportedLayout.fault(directory.path, what, mend=_MEND))
            continue
        part = _part(name, local=local)
        place = next((chunk.place for chunk in tensor.filled), None) if tensor.shape == () else None
        if kind == "step" and place is not None:
            first = steps.setdefault(part.name, step := read_step(read_object(place)))
            if canonical(first) != canonical(step):
                faults.append(damaged(directory.path, f"{saved} is not that of other parts", str(first), str(step)))
        else:
            parts.setdefault(TensorKey(name=part.name, kind=kind), []).append((part, saved))
    return parts, steps


def _joined(
    directory: Directory, key: TensorKey, parts: Sequence[tuple[_Part, str]], family: list[tuple[str, Chunk]]
) -> Placement:
    """Join a tensor of its parts, whose chunks are added to `family`. Raises ValueError if not all are there."""
    tensors = {part[1:]: directory.tensors[saved] for part, saved in parts}
    experts, halves = {expert for expert, _ in tensors}, {half for _, half in tensors}
    kinds = {(tensor.shape, tensor.dtype) for tensor in tensors.values()}
    whole = len(tensors) == len(parts) == len(experts) * len(halves) and len(kinds) == 1
    rows = halves == {None} or (halves == {0, 1} and all(shape for shape, _ in kinds))
    if not whole or not rows or experts not in ({None}, {*range(len(experts))}):
        raise ValueError(f"is not whole in {', '.join(sorted(saved for _, saved in parts)[:4])}")
    ((shape, dtype),) = kinds
    tiles: list[Tile] = []
    for (_, expert, half), saved in parts:
        chunks = directory.tensors[saved].filled
        check_cover([Box(offset=chunk.offset, size=chunk.size) for chunk in chunks], shape)
        for chunk in chunks:
            offset = chunk.offset if not half else (chunk.offset[0] + shape[0], *chunk.offset[1:])
            first = (expert,) if expert is not None else ()
            box = Box(offset=(*first, *offset), size=(*(1 for _ in first), *chunk.size))
            tiles.append((len(family), 0, box))
            family.append((saved, chunk))
    shape = shape if halves == {None} else (2 * shape[0], *shape[1:])
    shape = shape if experts == {None} else (len(experts), *shape)
    return tiled_placement(key, shape, ElementType.named(dtype), tiles, family=str(key), buffer=BUFFER)


def _facts(groups: Sequence[Mapping[str, object]], steps: Mapping[str, Scalar], local: bool) -> OptimizerFacts:
    """The groups, of which the files name all members, and the steps."""
    made: list[GroupFacts] = []
    scalars: dict[str, dict[str, Scalar]] = {name: {"step": step} for name, step in steps.items()}
    for group in groups:
        saved = group["params"]
        assert isinstance(saved, list)
        names = dict.fromkeys(_part(name, local=local).name for name in saved)
        values = {name: value for name, value in group.items() if name not in ("params", "step")}
        made.append(GroupFacts(members=tuple(names), hyperparameters=values))
        if "step" in group:
            scalars |= {name: {"step": read_step(group["step"])} for name in names}
    return OptimizerFacts(groups=tuple(made), scalars=scalars)


def _unlike_others(path: str, placements: Mapping[TensorKey, Placement], facts: OptimizerFacts) -> Iterator[Fault]:
    """Parameters that lack a state or a group that others have, and those that are not known here."""
    kinds: dict[str, set[str]] = {}
    for key in placements:
        kinds.setdefault(key.name, set()).add(key.kind)
    groups = Counter(name for group in facts.groups for name in group.members)
    expected = {WEIGHT, *(kind for name in groups for kind in kinds.get(name, ()))}
    for name in sorted(kinds.keys() | groups.keys()):
        held = kinds.get(name, set())
        if _UNKNOWN.match(name):
            what = f"{name}: how Megatron-LM has named, split or fused this tensor is not known here"
            yield UnsupportedLayout.fault(path, what, mend=_MEND)
        elif groups[name] > 1 or (len(held) > 1 and not groups[name]):
            yield damaged(path, f"{name}, or its experts, are not in one param group", "1", str(groups[name]))
        elif groups[name] and held != expected:
            sides = (", ".join(sorted(one)) or "none" for one in (expected, held))
            yield damaged(path, f"{name} lacks a state that others have, or its weight", *sides)
        elif groups[name] and facts.scalars and name not in facts.scalars:
            yield damaged(path, f"{name} lacks the step that others have", "a step", "none")
