"""States of sharding type `dp_reshardable`: flat buckets of each model-parallel rank, and where parameters lie in them.

Keys are `optimizer.distributed.dp_group_idx_G.gbuf_idx_I.dtype_(torch.bfloat16, torch.float32).bucket_idx_B.KIND`, with
`chained_C.` in front where experts have an optimizer of their own; G is the rank in the tensor- and pipeline-parallel
group, I the model chunk (core/optimizer/distrib_optimizer.py, `sharded_param_state_dp_reshardable`, 0.16.1 to 0.19.2).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from ds_reshard.containers.dcp_directory import Chunk, Directory, Place
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout
from ds_reshard.formats.megatron.buckets import Bucket, Slot, boxes_between, bucket_size_of, buckets_of, shards_of
from ds_reshard.formats.megatron.checkpoint import read_object
from ds_reshard.formats.megatron.optimizer import KINDS, odd_states
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.layout import Holder, Layout, Placement, TensorKey, Tile
from ds_reshard.model.region import Box

FLAT = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.(gbuf_idx_\d+\..+)\.([^.]+)")
WORDS, _POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_OUTPUT, _EXPERTS = "output_layer.weight", "mlp.experts.experts"
_ATTENTION = (
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
)
_LAYER = {
    "local": (
        "self_attention.linear_qkv.layer_norm_",
        *(name for name in _ATTENTION if not name.endswith("norm_")),
        "mlp.linear_fc1.layer_norm_",
        "pre_mlp_layernorm.",
        "mlp.router.",
        "mlp.linear_fc1.",
        "mlp.linear_fc2.",
    ),
    "transformer_engine": (
        *_ATTENTION,
        "pre_mlp_layernorm.",
        "mlp.router.",
        "mlp.linear_fc1.layer_norm_",
        "mlp.linear_fc1.",
        "mlp.linear_fc2.",
    ),
}
"""The order in which a layer's modules are built (core/models/gpt/gpt_layer_specs.py, core/transformer/attention.py,
0.19.2), by the names that their tensors have in a checkpoint; the order inside Transformer Engine's is inferred."""
_UNEVEN = ("mtp_num_layers",)
RESAVE = "load it with the Megatron-LM that saved it, and save it with --dist-ckpt-optim-fully-reshardable"


@dataclass(slots=True, kw_only=True)
class FlatStates:
    """Of each state its tiles, copies that other ranks hold numbered; `chunks` are the shards of each family."""

    tiles: dict[TensorKey, list[Tile]] = field(default_factory=dict)
    chunks: dict[str, list[tuple[str, Chunk]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRank:
    """A model-parallel rank of one optimizer: its keys, pipeline stage, place among `size` tensor-parallel ranks.

    `experts` are those that it holds beside the `dense` parameters, or alone.
    """

    prefix: str
    stage: int
    number: int
    size: int
    shards: int
    dense: bool
    experts: range


def family_of(kind: str) -> str:
    return f"buckets of {kind}"


def find_states(
    directory: Directory, arguments: Mapping[str, object], weights: Mapping[TensorKey, Placement]
) -> FlatStates:
    """Where every state lies; what cannot be known is among the faults, by name."""
    found = FlatStates()
    found.faults += unsupported(directory.path, arguments)
    if found.faults:
        return found
    left = dict[str, list[str]]()
    for key in directory.tensors:
        match = FLAT.fullmatch(key)
        if match is not None:
            left.setdefault(f"{match[1]}.{match[2]}", []).append(match[3])
    seen, known = dict[tuple[str, tuple[Box, ...]], int](), set[str]()
    for rank, chunk, buckets in laid_out(arguments, weights, chained=any(key.startswith("chained_1.") for key in left)):
        names = (f"{rank.prefix}.per_bucket_numel", f"{rank.prefix}.per_bucket_numel_unpadded")
        sizes = [bucket_numels(directory.objects, name) for name in names]
        dtype = _same(directory, rank, chunk, sizes, buckets, found.faults)
        known.update(slot.name for bucket in buckets for _, slot in bucket.slots)
        for number, bucket in enumerate(buckets if dtype is not None else ()):
            stem = f"{rank.prefix}.gbuf_idx_{chunk}.dtype_{dtype}.bucket_idx_{number}"
            _place(directory, stem, bucket, seen, found, left)
    found.faults = list(unplaced(directory.path, weights, known)) or found.faults  # which make other buckets
    for stem in sorted(left) if not found.faults else ():
        found.faults.append(_other(directory.path, f"{stem}: the arguments call for no such bucket", "none", "one"))
    return found


def laid_out(
    arguments: Mapping[str, object], weights: Mapping[TensorKey, Placement], *, chained: bool
) -> Iterator[tuple[FlatRank, int, list[Bucket]]]:
    """The buckets of each buffer of each rank whose state is saved, numbered: one of each chunk with parameters."""
    pp, vp = (size_of(arguments, f"{name}pipeline_model_parallel_size") for name in ("", "virtual_"))
    fast = bool(arguments.get("ddp_pad_buckets_for_high_nccl_busbw"))
    for rank in _ranks(arguments, chained=chained):
        chunks = ((chunk, list(_slots(rank, chunk, pp, vp, arguments, weights))) for chunk in range(vp))
        for number, (chunk, slots) in enumerate((chunk, slots) for chunk, slots in chunks if slots):
            size = bucket_size_of(arguments, rank.stage, chunk)
            yield rank, number, buckets_of(slots, bucket_size=size, dp=rank.shards, fast=fast)


def unplaced(path: str, weights: Mapping[TensorKey, Placement], known: Collection[str]) -> Iterator[Fault]:
    """Weights that lie in no buffer, but for the bias of routers, which no optimizer steps (moe/router.py, 0.19.2)."""
    trained = {key.name for key in weights if key.kind == WEIGHT and not key.name.endswith(".router.expert_bias")}
    for name in sorted(trained - set(known)):
        what = f"{name}: where it lies in the flat buffers of the optimizer is not known: no layer of this kind is"
        yield UnsupportedLayout.fault(path, what, mend=RESAVE)


def unsupported(path: str, arguments: Mapping[str, object]) -> Iterator[Fault]:
    told = list[str]()
    if arguments.get("transformer_impl") not in _LAYER:
        told.append(f"transformer_impl {arguments.get('transformer_impl')}")
    told += uneven(arguments)
    told += [name for name in ("ddp_num_buckets", "moe_grouped_gemm") if arguments.get(name)]
    told += odd_states(arguments)
    if arguments.get("num_distributed_optimizer_instances") not in (None, 1):
        told.append("num_distributed_optimizer_instances")
    for name in told if arguments else ["no saved arguments (args)"]:
        what = f"with {name} the order in the optimizer's flat buffers is not known"
        yield UnsupportedLayout.fault(path, what, mend=RESAVE)


def uneven(arguments: Mapping[str, object]) -> list[str]:
    """What is not known of how layers are dealt out to stages."""
    told = [name for name in _UNEVEN if arguments.get(name)]
    if not told and layers_of(arguments) is None:
        sizes = (size_of(arguments, f"{name}pipeline_model_parallel_size") for name in ("", "virtual_"))
        told.append(f"num_layers {arguments.get('num_layers')} over {prod(sizes)} stages")
    return told


def layers_of(arguments: Mapping[str, object]) -> dict[tuple[int, int], range] | None:
    """The layers of each pipeline stage and model chunk; None where the sizes do not divide.

    Each chunk is dealt out to all stages, before the next (`get_num_layers_to_build`, core/transformer/
    transformer_block.py, and `get_transformer_layer_offset`, transformer_layer.py, 0.16.1 to 0.19.2); a hybrid model's
    pattern may say which (`select_pipeline_segment`, core/models/hybrid/hybrid_layer_allocation.py, 0.19.2).
    """
    layers, layout = arguments.get("num_layers"), arguments.get("pipeline_model_parallel_layout")
    pp, vp = (size_of(arguments, f"{name}pipeline_model_parallel_size") for name in ("", "virtual_"))
    if not isinstance(layers, int):
        return None
    pattern = str(arguments.get("hybrid_layer_pattern") or "").partition("/")[0]  # behind it are those of MTP
    counts = _laid_out(str(layout)) if layout else _dealt_out(arguments, layers, pp, vp)
    if "|" in pattern:
        counts = [len(stage) for stage in pattern.split("|")]
    if len(counts) != pp * vp or sum(counts) != layers or min(counts) < 0:
        return None
    spans = (range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))
    return {(at % pp, at // pp): span for at, span in enumerate(spans)}


def _dealt_out(arguments: Mapping[str, object], layers: int, pp: int, vp: int) -> list[int]:
    """How many layers each stage has of the first chunk, then of the next; none where that cannot be."""
    ends = [arguments.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    fixed = [one for one in ends if isinstance(one, int)]
    first, last = (bool(arguments.get(f"account_for_{one}_in_pipeline_split")) for one in ("embedding", "loss"))
    if len(fixed) > pp or (fixed and (first or last)):
        return []
    counts = [(layers - sum(fixed) + first + last) // max(1, pp - len(fixed))] * pp
    for stage, one in zip((0, pp - 1), ends, strict=True):
        counts[stage] = one if isinstance(one, int) else counts[stage]
    if any(count % vp for count in counts):
        return []
    made = [count // vp for count in counts] * vp
    made[0] -= first
    made[-1] -= last
    return made


_LONGEST = 10_000


def _laid_out(layout: str) -> list[int]:
    """The same of `--pipeline-model-parallel-layout`; none where the text is none, or longer than a layout can be.

    `parse_str_to_list`, core/transformer/pipeline_parallel_layer_layout.py, 0.18.2 and 0.19.2.
    """
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        if len(layout) > _LONGEST:
            return []
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout)
    return [stage.count("t") for stage in layout.split("|")] if set(layout) <= set("EtmL|") else []


def size_of(arguments: Mapping[str, object], name: str) -> int:
    value = arguments.get(name)
    return value if isinstance(value, int) and value > 0 else 1


def experts_cut(arguments: Mapping[str, object]) -> int:
    """Over how many tensor-parallel ranks experts are cut."""
    own = arguments.get("num_experts") and arguments.get("expert_tensor_parallel_size")
    return size_of(arguments, "expert_tensor_parallel_size" if own else "tensor_model_parallel_size")


def experts_apart(arguments: Mapping[str, object]) -> bool:
    """Whether the optimizer of the experts is not that of the dense parameters.

    core/tensor_parallel/layers.py, `use_expert_pgs`, 0.19.2; up to 0.18.2 only an expert-parallel size above 1 counts.
    """
    divided = size_of(arguments, "expert_model_parallel_size") > 1
    alike = experts_cut(arguments) == size_of(arguments, "tensor_model_parallel_size")
    return bool(arguments.get("num_experts")) and (divided or not alike)


def shards_of_experts(arguments: Mapping[str, object]) -> int:
    """Over how many ranks a buffer of experts is cut."""
    parts = size_of(arguments, "pipeline_model_parallel_size") * size_of(arguments, "expert_model_parallel_size")
    return max(1, size_of(arguments, "world_size") // (parts * experts_cut(arguments)))


def _ranks(arguments: Mapping[str, object], *, chained: bool) -> Iterator[FlatRank]:
    """Every rank whose state was saved, in Megatron's numbering: of each optimizer, pipeline stages outside."""
    tp, pp, ep = (size_of(arguments, f"{name}_model_parallel_size") for name in ("tensor", "pipeline", "expert"))
    etp = experts_cut(arguments)
    count, first = size_of(arguments, "num_experts") if arguments.get("num_experts") else 0, "chained_0." * chained
    for stage in range(pp):
        for number in range(tp):
            yield FlatRank(
                prefix=f"{first}optimizer.distributed.dp_group_idx_{stage * tp + number}",
                stage=stage,
                number=number,
                size=tp,
                shards=shards_of(arguments),
                dense=True,
                experts=range(0 if chained else count),
            )
        for part, number in ((part, number) for part in range(ep * chained) for number in range(etp)):
            yield FlatRank(
                prefix=f"chained_1.optimizer.distributed.dp_group_idx_{(stage * ep + part) * etp + number}",
                stage=stage,
                number=number,
                size=etp,
                shards=shards_of_experts(arguments),
                dense=False,
                experts=range(part * count // ep, (part + 1) * count // ep),
            )


def _slots(
    rank: FlatRank,
    chunk: int,
    pp: int,
    vp: int,
    arguments: Mapping[str, object],
    weights: Mapping[TensorKey, Placement],
) -> Iterator[Slot]:
    """What a rank holds of a model chunk, in the order of `named_parameters`."""
    layers = (layers_of(arguments) or {})[rank.stage, chunk]
    tied = not arguments.get("untie_embeddings_and_output_weights")
    names: list[tuple[str, int | None]] = []
    if rank.dense and not rank.stage and not chunk:
        names += [(WORDS, None), (_POSITIONS, None)]
    for layer in layers:
        stem = f"decoder.layers.{layer}."
        if rank.dense:
            order = _LAYER[str(arguments["transformer_impl"])]
            names += [(f"{stem}{name}{leaf}", None) for name in order for leaf in ("weight", "bias")]
        for expert in rank.experts:
            of_expert = (
                f"{stem}{_EXPERTS}.{fc}.{leaf}" for fc in ("linear_fc1", "linear_fc2") for leaf in ("weight", "bias")
            )
            names += [(name, expert) for name in of_expert]
    if rank.dense and rank.stage == pp - 1 and chunk == vp - 1:
        names += [(f"decoder.final_layernorm.{leaf}", None) for leaf in ("weight", "bias")]
        names += [(WORDS, None)] if tied and pp > 1 else [(_OUTPUT, None)] if not tied else []
    for name, number in names:
        placement = weights.get(TensorKey(name=name, kind=WEIGHT))
        if placement is not None:
            cut = rank.size if number is None else experts_cut(arguments)
            boxes = tuple(_held(placement, number, rank.number % cut, cut))
            yield Slot(name=name, boxes=boxes, shared=tied and pp > 1 and name == WORDS)


def _held(placement: Placement, expert: int | None, number: int, size: int) -> Sequence[Box]:
    """The boxes that one of `size` tensor-parallel ranks holds: the chunks of the file say how the tensor was cut.

    One, or of a gated linear unit two: the gate's and the other half's.
    """
    boxes = [tile.box for tile in placement.parts]
    if expert is not None:
        boxes = [box for box in boxes if box.offset[0] == expert]
    boxes.sort(key=lambda box: box.offset)
    return boxes if len(boxes) == 1 else boxes[number::size]


def bucket_numels(objects: Mapping[str, Place], name: str) -> list[dict[str, list[int]]] | None:
    """Sizes of each chunk's buckets, by the types of the buffer; None where they are not there."""
    place = objects.get(f"{name}/shard_0_1")
    held = read_object(place) if place is not None else None
    if not isinstance(held, list):
        held = [held]
    found: list[dict[str, list[int]]] = []
    for one in held:
        if not isinstance(one, dict):
            return None
        rows: dict[str, list[int]] = {}
        for types, sizes in one.items():
            if not isinstance(types, tuple) or not isinstance(sizes, int | list):
                return None
            rows[f"({', '.join(map(str, types))})"] = sizes if isinstance(sizes, list) else [sizes]
        found.append(rows)
    return found


def _same(
    directory: Directory,
    rank: FlatRank,
    chunk: int,
    sizes: Sequence[list[dict[str, list[int]]] | None],
    buckets: Sequence[Bucket],
    faults: list[Fault],
) -> str | None:
    """The types of a buffer of which the saved sizes are those that were computed; else None, and a fault."""
    computed = [[bucket.numel for bucket in buckets], [bucket.unpadded for bucket in buckets]]
    saved = [one[chunk] if one is not None and chunk < len(one) else {} for one in sizes]
    if len(saved[0]) == 1 and saved[0].keys() == saved[1].keys():
        (dtype,) = saved[0]
        if [saved[0][dtype], saved[1][dtype]] == computed:
            return dtype
    what = f"{rank.prefix}: the buckets of model chunk {chunk} are others than those of its parameters"
    fault = _other(directory.path, what, str(computed), str([list(one.values()) for one in saved]))
    faults.append(frozen(fault, RESAVE) if len(saved[0]) == 1 and saved[0].keys() == saved[1].keys() else fault)
    return None


def by_holder(placements: Mapping[TensorKey, Placement], shards: Mapping[str, int]) -> dict[Holder, Layout]:
    """The copies of tensors that other ranks hold, a layout for the first ones, one for the second ones, and so on."""
    found: dict[Holder, dict[TensorKey, Placement]] = {}
    for key, placement in placements.items():
        first = key._replace(copy=0)
        if key.copy:
            tiles = tuple(tile._replace(key=first) for tile in placement.tiles)
            found.setdefault(Holder(rank=key.copy), {})[first] = placement._replace(key=first, tiles=tiles)
    return {holder: Layout(own, shards) for holder, own in sorted(found.items())}


def _place(
    directory: Directory,
    stem: str,
    bucket: Bucket,
    seen: dict[tuple[str, tuple[Box, ...]], int],
    found: FlatStates,
    left: dict[str, list[str]],
) -> None:
    """Put every slot of a bucket where it lies, for each kind of state."""
    copies = []
    for _, slot in bucket.slots:
        copies.append(seen.get((slot.name, slot.boxes), 0))
        seen[slot.name, slot.boxes] = copies[-1] + 1
    kinds = left.pop(stem, [])
    if not kinds:
        found.faults.append(
            _other(directory.path, f"{stem}: the bucket is missing", "param, exp_avg, exp_avg_sq", "none")
        )
    for saved in kinds:
        key = f"{stem}.{saved}"
        tensor = directory.tensors[key]
        if tensor.shape != (bucket.unpadded,):
            found.faults.append(
                _other(directory.path, f"{key} is of another size", str(bucket.unpadded), str(tensor.shape))
            )
            continue
        kind = KINDS.get(saved, saved)
        family = found.chunks.setdefault(family_of(kind), [])
        parts = sorted((one for one in tensor.chunks if one.size != (0,)), key=lambda one: one.offset)
        first, starts = len(family), [one.offset[0] for one in parts]
        family += [(key, one) for one in parts]
        for (at, slot), copy in zip(bucket.slots, copies, strict=True):
            tiles = found.tiles.setdefault(TensorKey(name=slot.name, kind=kind, copy=copy), [])
            for box in slot.boxes:
                for number in range(max(0, bisect_right(starts, at) - 1), len(parts)):
                    begin = starts[number]
                    if begin >= at + box.numel:
                        break
                    end = min(at + box.numel, begin + parts[number].size[0])
                    pieces = boxes_between(box, max(at, begin) - at, end - at)
                    tiles += [(first + number, at + inside - begin, piece) for inside, piece in pieces]
                at += box.numel


def _other(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=f"restore the folder from a copy; or {RESAVE}")


def frozen(fault: Fault, mend: str) -> Fault:
    """The same of files that agree with themselves: no damage, but parameters of which no file says that they were.

    A bucket, a flat buffer and a param group hold those that were trained, without their names.
    """
    return replace(fault, error=UnsupportedLayout.__name__, what=f"{fault.what}: some were frozen", mend=mend)


def ordered(tiles: Sequence[Tile]) -> list[Tile]:
    return sorted(tiles, key=lambda tile: tile[2].offset)
