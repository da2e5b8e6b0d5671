"""A checkpoint of Megatron-LM's format `torch`: a folder of each model-parallel rank; Megatron is not needed for it.

Folders are `mp_rank_TT`, `mp_rank_TT_PPP` with several pipeline stages, with `_EEE` behind where experts are divided
(megatron/training/checkpointing.py, `get_checkpoint_name`, 0.16.1 to 0.19.2). Tensors are pieces of tensor-parallel
ranks, with local numbers of layers and experts. They get the names that the same model has in `torch_dist`, so that one
state is the same tensors in both formats: the experts of a layer are one tensor.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ds_reshard.containers import folders
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.buckets import Slot, bucket_size_of, buckets_of, shards_of
from ds_reshard.formats.megatron.checkpoint import MODEL, Chain, Group, arguments_of, chain_of, counted, objects_of
from ds_reshard.formats.megatron.flat_states import (
    by_holder,
    experts_apart,
    experts_cut,
    frozen,
    layers_of,
    shards_of_experts,
    size_of,
    uneven,
)
from ds_reshard.formats.megatron.optimizer import EXPERTS, KINDS, Trained, facts_of, members_of, odd_states, saved_steps
from ds_reshard.formats.megatron.target import Shown, stacks
from ds_reshard.model.checkpoint import SavedFile, SavedListing, SavedState
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.facts import canonical, number_of
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Holder, Layout, Placement, TensorKey, check_cover, tiled_placement
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box

FLAT_FILE = "distrib_optim.pt"
_FAMILY = "model-parallel ranks"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"((?:de|en)coder\.layers\.)(\d+)\.(.+)")
_OTHER_LAYER = re.compile(r"(?!decoder\.layers\.)(?:.*\.)?layers\.\d+\..+")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_COLUMNS = re.compile(
    r"(?:.*\.)?(linear_qkv|linear_fc1)\.(weight|bias)|embedding\.word_embeddings\.weight|output_layer\.weight"
)
_ROWS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_WHOLE = re.compile(
    r"embedding\.position_embeddings\.weight|decoder\.final_layernorm\.(weight|bias)|"
    r"decoder\.layers\.\d+\.(self_attention\.(linear_proj\.bias|[qk]_layernorm\.(weight|bias))|mlp\.linear_fc2\.bias|"
    r"(pre_mlp_layernorm|mlp\.router)\.(weight|bias)|"
    r"(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias))"
)
LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names in local layers, and in `torch_dist`: `sharded_state_dict_keys_map` of core/models/gpt/gpt_layer_specs.py and,
for encoders, of bert/bert_layer_specs.py and T5/t5_spec.py (0.18.2 and 0.19.2)."""
_SAME = (
    "num_layers",
    "swiglu",
    "padded_vocab_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_experts",
    "data_parallel_size",
    "consumed_train_samples",
)
_NOT_READ = ("ddp_num_buckets", "fp8", "fp4")
_EXPERTS_UNKNOWN = (
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "moe_latent_size",
    "use_tp_pp_dp_mapping",
)
"""With these names, cuts or the places of ranks are others than those that were seen."""
_MEND = "restore the folder from a copy, or take another iteration"
_SAVE_DIST = "save it with --ckpt-format torch_dist"
_SAVE_NAMED = f"{_SAVE_DIST} --dist-ckpt-optim-fully-reshardable, or add --no-load-optim"
"""Of a distributed optimizer, whose states lie flat in torch_dist as well unless they are fully reshardable."""
_NAMELESS = (
    "its fp32 optimizer numbers its states, and nothing proves which parameter a number is: they are not read; "
    "save it with --ckpt-format torch_dist"
)


class _Piece(NamedTuple):
    """What one rank holds of a tensor: which one, the whole's shape, the boxes that the bytes are of, and the bytes."""

    key: TensorKey
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One folder, read: its place, what its files hold, and the layers of each stage and chunk."""

    path: str
    tp: int
    pp: int
    ep: int
    held: Mapping[object, object]
    flat: Sequence[object]
    arguments: Mapping[str, object]
    layers: Mapping[tuple[int, int], range]

    @property
    def models(self) -> list[Mapping[object, object]]:
        """The model chunks: one, or those of virtual stages."""
        count = size_of(self.arguments, "virtual_pipeline_model_parallel_size")
        names = ["model"] if count == 1 else [f"model{number}" for number in range(count)]
        found = [self.held.get(name) for name in names]
        return [one for one in found if isinstance(one, Mapping)]

    def tensor_parallel(self, name: str) -> tuple[int, int]:
        """This rank's place among those that a tensor is cut over, and their number: experts have one of their own."""
        size = size_of(self.arguments, "tensor_model_parallel_size")
        alone = EXPERTS in name and experts_cut(self.arguments) != size
        return (0, 1) if alone else (self.tp, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFormat(SavedState):
    """What the files tell; the shards are the folders, pieces their buffers. `random` has states by tp, pp, ep rank."""

    replicas: Mapping[Holder, Layout]
    arguments: Mapping[str, object]
    extents: Sequence[Mapping[str, Extent]]
    shown: Shown
    random: Mapping[tuple[int, int, int], object]
    distributed: bool = True
    flat: bool = False
    ungrouped: str = ""

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        return self.extents[shard]

    def random_states(self) -> Mapping[str, object]:
        return {key: held for key, (held,) in self.shown.objects.items() if key.startswith("rng_state/")}


def is_torch_format(folder: str) -> bool:
    return bool(_folders(folder))


def _folders(folder: str) -> list[str]:
    """Those of ranks; ranks that write nothing leave empty ones (`ensure_directory_exists`)."""
    named = [name for name in folders.names(folder) if _FOLDER.fullmatch(name)]
    return [name for name in named if folders.is_file(os.path.join(folder, name, MODEL))]


def places(arguments: Mapping[str, object]) -> dict[str, tuple[int, int, int]]:
    """The folders that are written, each with its rank's place: tensor-, pipeline-, expert-parallel.

    By the first rank of each group over which the dense parameters or the experts are the same. Experts have a grid of
    ranks of their own (core/parallel_state.py, `initialize_model_parallel`, 0.19.2): where they are not cut as the
    dense parameters are, not every pair of places is a rank's.
    """
    tp, pp, ep = (size_of(arguments, f"{name}_model_parallel_size") for name in ("tensor", "pipeline", "expert"))
    etp = experts_cut(arguments)
    ranks = [(at % tp, stage, at // etp % ep) for stage in range(pp) for at in range(max(tp, etp * ep))]
    return {f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1): (t, p, e) for t, p, e in ranks}


def list_torch_format(folder: str) -> SavedListing:
    files = {}
    for name in _folders(folder):
        for file, nbytes in folders.files(os.path.join(folder, name)).items():
            files[f"{name}/{file}"] = SavedFile(nbytes=nbytes, role="optimizer" if file == FLAT_FILE else "model")
    return SavedListing(format="Megatron-LM, torch", writer="Megatron-LM", folder=folder, files=files)


def open_torch_format(folder: str, *, optimizer: bool = True) -> TorchFormat:
    """Read every folder's pickles; raises every structural fault at once, UnsupportedLayout by name.

    `optimizer=False` leaves the optimizer's states out, and does not open the files that have nothing else.
    """
    ranks = _ranks(folder, optimizer=optimizer)
    first, faults = ranks[0], list[Fault]()
    placed: dict[TensorKey, list[tuple[int, _Piece]]] = {}
    extents: list[dict[str, Extent]] = []
    seen = Counter[tuple[TensorKey, tuple[Box, ...]]]()
    for rank in ranks:
        begin, held = len(extents), Counter[TensorKey]()
        for piece in _pieces(rank, faults):  # of one tensor's experts each is in a shard of its own
            shard = begin + held[piece.key]
            if shard == len(extents):
                extents.append({})
            key = piece.key._replace(copy=seen[piece.key, piece.boxes])
            seen[piece.key, piece.boxes] += 1
            held[piece.key] += 1
            placed.setdefault(key, []).append((shard, piece))
            extents[shard][_buffer(piece.key)] = piece.extent
    faults += _groups_differ(ranks)
    raise_faults(_causes(faults), subject=f"checkpoint {folder}")
    placements = {key: _placed(folder, key, pieces, faults) for key, pieces in placed.items()}
    raise_faults(faults, subject=f"checkpoint {folder}")
    layout = Layout({key: one for key, one in placements.items() if not key.copy}, {_FAMILY: len(extents)})
    names = dict.fromkeys(key.name for key in layout.placements if key.kind != WEIGHT)
    raise_faults(_stateless(folder, layout, names), subject=f"checkpoint {folder}")
    trained = [Trained(name=name, shape=layout[TensorKey(name=name, kind=WEIGHT)].shape) for name in names]
    chain = chain_of(first.held.get("optimizer"), {}) if names else None
    facts, ungrouped = facts_of(chain, first.held.get("optimizer"), trained, first.arguments)
    return TorchFormat(
        folder=folder,
        layout=layout,
        replicas=by_holder(placements, {_FAMILY: len(extents)}),
        facts=facts,
        objects=dict(objects_of(first.held, first.arguments)),
        arguments=first.arguments,
        extents=extents,
        shown=_shown(ranks, chain),
        random={(rank.tp, rank.pp, rank.ep): rank.held["rng_state"] for rank in ranks if "rng_state" in rank.held},
        ungrouped=ungrouped,
        ranks=counted(first.arguments.get("data_parallel_size")),
        notes=() if names or "optimizer" not in first.held else (_NAMELESS,),
    )


def _causes(faults: list[Fault]) -> list[Fault]:
    """The faults without what follows from a part that is not supported: buffers of another size are no damage then."""
    return [fault for fault in faults if fault.error == UnsupportedLayout.__name__] or faults


def _stateless(folder: str, layout: Layout, names: Mapping[str, object]) -> list[Fault]:
    """Weights of which no rank holds a state, where others have some."""
    told = sorted(key.name for key in layout.placements if key.kind == WEIGHT and names and key.name not in names)
    return [_damaged(folder, f"{name}: no rank holds a state of it", "a master", "none") for name in told]


def _shown(ranks: Sequence[_Rank], chain: Chain | None) -> Shown:
    """What a `torch_dist` checkpoint has beside its tensors: random states by rank, states of layers by layer."""
    objects, first = dict[str, list[object]](), ranks[0]
    tp, pp = (size_of(first.arguments, f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    layers = size_of(first.arguments, "num_layers")
    for rank in ranks:
        if "rng_state" in rank.held:
            objects.setdefault(f"rng_state/shard_{rank.pp}.{rank.tp}_{pp}.{tp}", [rank.held["rng_state"]])
        for number, model in enumerate(rank.models):
            for local, held in model.items():
                name, expert = _name(rank, number, str(local))
                match, experts = LAYER.fullmatch(name), size_of(first.arguments, "num_experts")
                if match is not None and match[3].endswith("._extra_state"):
                    place = f"{match[2]}_{layers}" if expert is None else f"{match[2]}.{expert}_{layers}.{experts}"
                    objects[f"{match[1]}{match[3]}/shard_{place}"] = [held]
                elif name.endswith("._extra_state") and any(str(one).startswith("encoder.") for one in model):
                    objects[f"{name}/shard_0_1"] = [held]  # GPTModel leaves out that of its output layer
    apart = ("optimizer", "rng_state")
    common = {name: value for name, value in first.held.items() if name not in apart and "model" not in str(name)}
    return Shown(common=common, objects=objects, chain=chain, stacked=stacks(first.arguments))


def _ranks(folder: str, *, optimizer: bool) -> list[_Rank]:
    """Every folder that the arguments of the first call for, read; faults for those that are not there or too many."""
    names = _folders(folder)
    first = arguments_of(_load(os.path.join(folder, names[0], MODEL)).get("args"))
    raise_faults(list(_unsupported(folder, first, optimizer=optimizer)), subject=f"checkpoint {folder}")
    known, parts = places(first), ("tensor", "pipeline", "expert")
    sizes = ", ".join(f"{part[0]}p {size_of(first, f'{part}_model_parallel_size')}" for part in parts)
    faults = [
        CheckpointNotFound.fault(os.path.join(folder, name), "is missing", sizes, "none", mend=_MEND)
        for name in known
        if name not in names
    ]
    faults += [
        _damaged(os.path.join(folder, name), f"is no folder of {sizes}, as the arguments say", "none", "one")
        for name in names
        if name not in known
    ]
    raise_faults(faults, subject=f"checkpoint {folder}")
    ranks, layers = [], layers_of(first) or {}
    for name, (t, p, e) in known.items():
        path = os.path.join(folder, name)
        held, file = _load(os.path.join(path, MODEL)), os.path.join(path, FLAT_FILE)
        held = held if optimizer else {name: value for name, value in held.items() if name != "optimizer"}
        arguments = arguments_of(held.get("args"))
        apart = bool(arguments.get("use_distributed_optimizer")) and "optimizer" in held
        if apart and not folders.is_file(file):
            faults.append(CheckpointNotFound.fault(file, "is missing", "the optimizer's state", "none", mend=_MEND))
            continue
        flat = _optimizers(file, arguments) if apart else ()
        ranks.append(_Rank(path=path, tp=t, pp=p, ep=e, held=held, flat=flat, arguments=arguments, layers=layers))
    raise_faults(faults, subject=f"checkpoint {folder}")
    raise_faults([fault for rank in ranks for fault in _differs(rank, ranks[0])], subject=f"checkpoint {folder}")
    return ranks


def _optimizers(path: str, arguments: Mapping[str, object]) -> list[object]:
    """What is saved of each distributed optimizer, None of one that another rank saves: several are a list.

    `ChainedOptimizer.save_parameter_state`, core/optimizer/optimizer.py, 0.16.1 to 0.19.2.
    """
    with open_archive(path) as archive:
        held = archive.load()
    found, known = held if isinstance(held, list) else [held], {1 + experts_apart(arguments)}
    if size_of(arguments, "expert_model_parallel_size") == 1:
        known.add(1)  # 0.18 and older keep the experts among the dense parameters then, however they are cut
    if len(found) not in known:
        what = "holds other optimizers than its arguments call for"
        raise_faults([_damaged(path, what, str(max(known)), str(len(found)))], subject=f"checkpoint {path}")
    return found


def _load(path: str) -> Mapping[object, object]:
    with open_archive(path) as archive:
        held = archive.load()
    if not isinstance(held, dict):
        raise CheckpointDamaged(f"{path}: holds a {type(held).__name__}, where Megatron saves a dict; {_MEND}")
    return held


def _unsupported(folder: str, arguments: Mapping[str, object], *, optimizer: bool) -> Iterator[Fault]:
    told = [*uneven(arguments), *(name for name in _NOT_READ if arguments.get(name))]
    if arguments.get("num_distributed_optimizer_instances") not in (None, 1):
        told.append("num_distributed_optimizer_instances")
    told += odd_experts(arguments) if arguments.get("num_experts") else []
    told += odd_states(arguments) if optimizer else []
    if optimizer and arguments.get("use_precision_aware_optimizer") and not arguments.get("optimizer_cpu_offload"):
        told.append("use_precision_aware_optimizer")  # masters may be remainders of bf16, which no argument tells
    for name in told:
        what = f"with {name} a checkpoint of format torch is not read"
        yield UnsupportedLayout.fault(folder, what, mend=_SAVE_DIST)


def odd_experts(arguments: Mapping[str, object]) -> list[str]:
    """What of a run with experts is not known here."""
    told = [f"num_experts and {name}" for name in _EXPERTS_UNKNOWN if arguments.get(name)]
    tp, ep = (size_of(arguments, f"{name}_model_parallel_size") for name in ("tensor", "expert"))
    count, cut = size_of(arguments, "num_experts"), experts_cut(arguments)
    if arguments.get("moe_layer_freq") not in (None, 1):
        told.append(f"moe_layer_freq {arguments.get('moe_layer_freq')}")
    if not arguments.get("use_distributed_optimizer"):
        told.append("num_experts and no distributed optimizer")
    if cut not in (1, tp) or max(tp, cut * ep) % min(tp, cut * ep):  # copies of some ranks alone would be saved
        told.append(f"expert_tensor_parallel_size {cut} and expert_model_parallel_size {ep} at tp {tp}")
    if count % ep:
        told.append(f"num_experts {count} over expert_model_parallel_size {ep}")
    return told


def _differs(rank: _Rank, first: _Rank) -> Iterator[Fault]:
    """What one rank's file says otherwise than the first's, and otherwise than its folder."""
    said = {"iteration": (rank.held.get("iteration"), first.held.get("iteration"))}
    said |= {f"args.{name}": (rank.arguments.get(name), first.arguments.get(name)) for name in _SAME}
    for name, (own, others) in said.items():
        if canonical(own) != canonical(others):
            yield _damaged(rank.path, f"{name} is another than the first rank's", canonical(others), canonical(own))
    number, world = rank.arguments.get("rank"), size_of(rank.arguments, "world_size")
    tp, pp = (size_of(rank.arguments, f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    if isinstance(number, int) and not rank.arguments.get("use_tp_pp_dp_mapping"):
        stage = number // max(1, world // pp)
        expert = number // experts_cut(rank.arguments) % size_of(rank.arguments, "expert_model_parallel_size")
        own, place = [
            f"tp {t}, pp {p}, ep {e}" for t, p, e in ((rank.tp, rank.pp, rank.ep), (number % tp, stage, expert))
        ]
        if own != place:
            yield _damaged(rank.path, "was saved by another rank than its folder is of", own, place)


def _pieces(rank: _Rank, faults: list[Fault]) -> Iterator[_Piece]:
    """All that a rank holds of weights and states."""
    models, count = rank.models, size_of(rank.arguments, "virtual_pipeline_model_parallel_size")
    if len(models) != count:
        faults.append(_damaged(rank.path, "holds another number of model chunks", str(count), str(len(models))))
        return
    odd = next((str(name) for model in models for name in model if _OTHER_LAYER.fullmatch(str(name))), None)
    if odd is not None and len(rank.layers) > 1:  # each stage counts its own from 0
        what = f"{odd}: which layer of the whole model it is, is not known of several stages"
        faults.append(UnsupportedLayout.fault(rank.path, what, mend=_SAVE_DIST))
        return
    chunks = [list(_weights(rank, number, model, faults)) for number, model in enumerate(models)]
    yield from (piece for chunk in chunks for piece in chunk)
    if rank.flat:
        for optimizer, flat in enumerate(rank.flat):
            held = chunks if flat is not None else []
            if len(rank.flat) > 1:
                held = [[one for one in chunk if (EXPERTS in one.key.name) is bool(optimizer)] for chunk in held]
            for buffer, number in enumerate(number for number, own in enumerate(held) if own):
                yield from _flat(rank, flat, buffer, number, held[number], experts=bool(optimizer), faults=faults)
    elif "optimizer" in rank.held:
        yield from _plain(rank, [piece for chunk in chunks for piece in chunk], faults)


def _weights(rank: _Rank, number: int, model: Mapping[object, object], faults: list[Fault]) -> Iterator[_Piece]:
    for local, held in model.items():
        if not isinstance(held, TensorRecord) or not _is_floating(held.dtype):
            continue
        name, expert = _name(rank, number, str(local))
        cut = _cut(rank, name, held.shape, expert)
        if cut is None or not held.contiguous:
            what = f"{local}: how it is cut over tensor-parallel ranks is not known"
            faults.append(UnsupportedLayout.fault(rank.path, what, mend=_SAVE_DIST))
            continue
        yield _Piece(TensorKey(name=name, kind=WEIGHT), *cut, extent_of(held))


def _is_floating(dtype: ElementType) -> bool:
    return dtype.label.startswith(("float", "bfloat"))


def _name(rank: _Rank, number: int, local: str) -> tuple[str, int | None]:
    """The name in the whole model, as `torch_dist` has it, and the number of an expert."""
    arguments, match = rank.arguments, LAYER.fullmatch(local)
    if match is None:
        shared = local == "output_layer.weight" and not arguments.get("untie_embeddings_and_output_weights")
        return ("embedding.word_embeddings.weight" if shared else local), None
    layer, rest = int(match[2]) + rank.layers[rank.pp, number].start, match[3]
    for own, other in LOCAL.items() if arguments.get("transformer_impl") == "local" else ():
        rest = other + rest.removeprefix(own) if rest.startswith(own) else rest
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return f"{match[1]}{layer}.{rest}", None
    each = size_of(arguments, "num_experts") // size_of(arguments, "expert_model_parallel_size")
    return f"{match[1]}{layer}{EXPERTS}experts.{expert[2]}", int(expert[1]) + rank.ep * each


def _cut(
    rank: _Rank, name: str, shape: tuple[int, ...], expert: int | None
) -> tuple[tuple[int, ...], tuple[Box, ...]] | None:
    """The shape of the whole tensor, and the boxes of it that a rank's piece is, one after another."""
    number, tp = rank.tensor_parallel(name)
    axis = axis_of(name, tp)
    if axis is None:
        return None
    whole = tuple(size * tp if at == axis else size for at, size in enumerate(shape))
    boxes = boxes_of(name, whole, axis, number, tp, rank.arguments)
    if expert is None:
        return whole, boxes
    count = size_of(rank.arguments, "num_experts")
    return (count, *whole), tuple(Box(offset=(expert, *one.offset), size=(1, *one.size)) for one in boxes)


def axis_of(name: str, tp: int) -> int | None:
    """Along which axis a tensor is cut over tensor-parallel ranks, -1 where each has all of it; None: not known."""
    if tp == 1 or _WHOLE.fullmatch(name):
        return -1
    return 1 if _ROWS.fullmatch(name) else 0 if _COLUMNS.fullmatch(name) else None


def boxes_of(
    name: str, whole: tuple[int, ...], axis: int, at: int, tp: int, arguments: Mapping[str, object]
) -> tuple[Box, ...]:
    """The boxes of a tensor that a rank has: one, or of a gated linear unit one of each half."""
    if axis < 0:
        return (Box.whole(whole),)
    gated = ".linear_fc1." in name and (arguments.get("swiglu") or arguments.get("quick_geglu"))
    size = whole[axis] // (tp * (2 if gated else 1))
    return tuple(Box.along(whole, axis, place * size, size) for place in ((at, tp + at) if gated else (at,)))


def _flat(
    rank: _Rank,
    flat: object,
    buffer: int,
    number: int,
    weights: Sequence[_Piece],
    *,
    experts: bool,
    faults: list[Fault],
) -> Iterator[_Piece]:
    """The pieces of a flat buffer, in which the padding at the end of each bucket is left out (`buckets_coalesced`).

    Buffers are numbered without those chunks of the model that have no parameters.
    """
    path, arguments = os.path.join(rank.path, FLAT_FILE), rank.arguments
    held = flat.get(buffer) if isinstance(flat, Mapping) else None
    tensors = next(iter(held.values())) if isinstance(held, Mapping) and len(held) == 1 else None
    if not isinstance(flat, Mapping) or not isinstance(tensors, Mapping) or flat.get("buckets_coalesced") is not True:
        what = f"holds no flat buffer of one type for model chunk {number}"
        faults.append(UnsupportedLayout.fault(path, what, mend=_SAVE_DIST))
        return
    tied = not arguments.get("untie_embeddings_and_output_weights")
    tied = tied and size_of(arguments, "pipeline_model_parallel_size") > 1
    slots = [
        Slot(name=piece.key.name, boxes=piece.boxes, shared=tied and piece.key.name.startswith("embedding.word_"))
        for piece in weights
    ]
    buckets = buckets_of(
        slots,
        bucket_size=bucket_size_of(arguments, rank.pp, number),
        dp=shards_of_experts(arguments) if experts else shards_of(arguments),
        fast=bool(arguments.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )
    shapes, numel = {piece.key.name: piece.shape for piece in weights}, sum(bucket.unpadded for bucket in buckets)
    if (told := tensors.get("numel_unpadded")) != numel:
        what = f"model chunk {number}: the flat buffer is of another size than its parameters"
        alike = all(getattr(one, "shape", None) == (told,) for kind, one in tensors.items() if kind != "numel_unpadded")
        fault = _damaged(path, what, str(numel), str(told))
        faults.append(frozen(fault, _SAVE_NAMED) if alike and isinstance(told, int) and told < numel else fault)
        return
    for kind, tensor in tensors.items():
        if kind == "numel_unpadded":
            continue
        if not isinstance(tensor, TensorRecord) or tensor.shape != (numel,) or not tensor.contiguous:
            faults.append(_damaged(path, f"{kind} of model chunk {number} is no flat buffer", str(numel), "another"))
            continue
        whole, base = extent_of(tensor), 0
        for bucket in buckets:
            for at, slot in bucket.slots:
                key = TensorKey(name=slot.name, kind=KINDS.get(str(kind), str(kind)))
                yield _Piece(key, shapes[slot.name], slot.boxes, whole.part(base + at, slot.numel))
            base += bucket.unpadded


def _plain(rank: _Rank, weights: Sequence[_Piece], faults: list[Fault]) -> Iterator[_Piece]:
    """The states of an optimizer that is not distributed, and has masters: by the numbers that its groups give.

    They number the parameters group by group, each in the model's order (`Float16OptimizerWithFloat16Params`).
    """
    state, groups = rank.held["optimizer"], _groups(rank)
    masters = state.get("fp32_from_fp16_params") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(masters, list):
        return  # FP32Optimizer: told in the notes
    inner = state.get("optimizer")
    states = inner.get("state") if isinstance(inner, Mapping) else None
    if len(saved_steps(state)) > 1:
        what = "its parameters are at several steps, and a param group has one"
        faults.append(UnsupportedLayout.fault(rank.path, what, mend=_MEND))
        return
    local = {piece.key.name: piece for piece in weights}
    shapes = {name: _local_shape(piece) for name, piece in local.items()}
    members = members_of(groups, [Trained(name=name, shape=shape) for name, shape in shapes.items()], rank.arguments)
    if members is None or not isinstance(states, Mapping) or len(masters) != len(groups):
        what = "which parameter a state is of is told by no file, and no rule of Megatron's"
        faults.append(UnsupportedLayout.fault(rank.path, what, mend=_SAVE_DIST))
        return
    for names, group, owned in zip(members, groups, masters, strict=True):
        numbers, own = (one if isinstance(one, list) else [] for one in (group.get("params"), owned))
        if not len(numbers) == len(own) == len(names):
            what = "a param group has another number of parameters than Megatron's rule gives it"
            fault = _damaged(rank.path, what, str(len(names)), str(len(own)))
            faults.append(frozen(fault, _SAVE_DIST) if 0 < len(own) == len(numbers) else fault)
            continue
        for name, number, master in zip(names, numbers, own, strict=True):
            saved = states.get(number)
            for kind, tensor in {MASTER: master, **(saved if isinstance(saved, Mapping) else {})}.items():
                if kind == "step" and (not isinstance(tensor, TensorRecord) or tensor.numel == 1):
                    continue  # told with the param groups
                if not isinstance(tensor, TensorRecord) or tensor.shape != shapes[name] or not tensor.contiguous:
                    what = f"{name}: its {kind} is no tensor of its shape"
                    faults.append(UnsupportedLayout.fault(rank.path, what, str(list(shapes[name])), mend=_SAVE_DIST))
                    continue
                piece = local[name]
                yield _Piece(TensorKey(name=name, kind=str(kind)), piece.shape, piece.boxes, extent_of(tensor))


def _local_shape(piece: _Piece) -> tuple[int, ...]:
    return (sum(box.size[0] for box in piece.boxes), *piece.boxes[0].size[1:])


def _groups(rank: _Rank) -> list[Group]:
    return [group for groups in chain_of(rank.held.get("optimizer"), {}) or () for group in groups]


def _groups_differ(ranks: Sequence[_Rank]) -> Iterator[Fault]:
    """Groups, but for their members, and steps that are not each rank's; up to 0.15 a stage has its own order."""
    told = [
        sorted(canonical({k: v for k, v in group.items() if k != "params"}) for group in _groups(one))
        + [f"step {number_of(step)}" for step in saved_steps(one.held.get("optimizer"))]
        for one in ranks
    ]
    for rank, texts in zip(ranks, told, strict=True):
        if texts != told[0]:
            sides = (", ".join(set(one) - set(other))[:80] for one, other in ((told[0], texts), (texts, told[0])))
            yield _damaged(rank.path, "its param groups or their steps are others than the first rank's", *sides)


def _buffer(key: TensorKey) -> str:
    return f"{key.name}[{key.kind}]"


def _placed(folder: str, key: TensorKey, pieces: Sequence[tuple[int, _Piece]], faults: list[Fault]) -> Placement:
    """A tensor of the pieces that ranks hold."""
    shape, dtype = pieces[0][1].shape, pieces[0][1].extent.dtype
    if any(piece.shape != shape or piece.extent.dtype is not dtype for _, piece in pieces):
        faults.append(_damaged(folder, f"{key}: its pieces are of several shapes or types", "one", "several"))
    if key.kind == MASTER and dtype is not ElementType.FLOAT32:
        faults.append(
            UnsupportedLayout.fault(folder, f"{key}: its master is no fp32", "float32", dtype.label, mend=_MEND)
        )
    tiles = []
    for shard, piece in pieces:
        origins = accumulate((box.numel for box in piece.boxes), initial=0)
        tiles += [(shard, origin, box) for origin, box in zip(origins, piece.boxes, strict=False)]
    try:
        check_cover([box for _, _, box in tiles], shape)
    except ValueError as error:
        faults.append(_damaged(folder, f"{key}: its pieces are not all of it: {error}", "each element once", "others"))
    return tiled_placement(key, shape, dtype, tiles, family=_FAMILY, buffer=_buffer(key))


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=_MEND)
