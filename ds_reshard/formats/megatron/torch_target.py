"""A checkpoint of Megatron-LM's format `torch` that is to be written, for stock Megatron-LM at one tp and pp.

A folder of each model-parallel rank with its pieces and its flat buffers, laid out as `buckets.py` says. Of layers of
`--transformer-impl local` without experts, the order of which was observed (`torch_format.py` reads the same).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.buckets import Bucket, Slot
from ds_reshard.formats.megatron.checkpoint import MODEL, TRACKER, arguments_of, iteration_name
from ds_reshard.formats.megatron.flat_states import FlatRank, laid_out, unplaced, unsupported
from ds_reshard.formats.megatron.target import Shown, group_with
from ds_reshard.formats.megatron.torch_format import FLAT_FILE, LAYER, LOCAL, axis_of, boxes_of
from ds_reshard.model.content import MASTER, WEIGHT, Content, Held
from ds_reshard.model.layout import Layout, Placement, TensorKey, Tile, tiled
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

_FAMILY = "model-parallel ranks"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_KIND = {MASTER: "param"}


def torch_format_target(
    content: Content, shown: Shown, *, tp: int, pp: int, dp: int, rows: int | None, step: object
) -> Target:
    """The folders; `rows` is the vocabulary's size with its padding there, None where the source tells it.

    Raises UnsupportedLayout, with every reason, for what no file tells or the sizes do not divide.
    """
    saved = arguments_of(shown.common.get("args"))
    padded = rows if rows is not None else _rows(saved, tp)
    sizes = {"tensor": tp, "pipeline": pp, "virtual_pipeline": None, "expert": 1}
    arguments = saved | {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    arguments |= {"data_parallel_size": dp, "context_parallel_size": 1, "world_size": tp * pp * dp}
    arguments |= {"padded_vocab_size": padded, "use_distributed_optimizer": True, "sequence_parallel": False}
    arguments |= {"num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None}
    faults = [*_unsupported(content, arguments, tp), *unsupported(content.folder, arguments)]
    raise_faults(faults, subject=f"converting {content.folder} to megatron-torch")
    assert padded is not None
    writing = _Writing(content=content, shown=shown, arguments=arguments, tp=tp, pp=pp, rows=padded, step=step)
    known = {slot.name for _, buckets in writing.ranks for bucket in buckets for _, slot in bucket.slots}
    raise_faults(list(unplaced(content.folder, writing.weights, known)), subject=f"converting {content.folder}")
    iteration = str(shown.common.get("iteration", content.steps))
    held = f"rng_state/shard_0.0_{pp}.{tp}" in shown.objects
    return Target(
        layout=Layout(writing.placements, {_FAMILY: tp * pp}),
        wants={key: content.tensors[key._replace(copy=0)].origin for key in writing.placements},
        units=list(writing.units()),
        folder=iteration_name(iteration),
        pointers={TRACKER: iteration},
        notes=() if held else ("random states of this tp and pp were not saved: give the run --no-load-rng",),
    )


def _rows(arguments: Mapping[str, object], tp: int) -> int | None:
    """The rows of the vocabulary under another tp; None where the real number, which no file tells, decides."""
    rows, each, saved = (arguments.get(name) for name in ("padded_vocab_size", *_PADDED))
    if not isinstance(rows, int) or not isinstance(each, int) or not isinstance(saved, int):
        return None
    least = rows - each * saved + 1
    found = {-(-real // (each * tp)) * each * tp for real in (least, rows)}
    return found.pop() if len(found) == 1 else None


_PADDED = ("make_vocab_size_divisible_by", "tensor_model_parallel_size")


def _unsupported(content: Content, arguments: Mapping[str, object], tp: int) -> Iterator[Fault]:
    def fault(what: str, mend: str) -> Fault:
        return UnsupportedLayout.fault(content.folder, what, mend=mend)

    if arguments.get("transformer_impl") != "local" or arguments.get("num_experts"):
        what = "has layers of Transformer Engine, or experts, of which no folder of format torch is written"
        yield fault(what, "--to megatron, which Megatron-LM loads under any tp and pp")
    if arguments["padded_vocab_size"] is None:
        what = f"does not tell how many rows its vocabulary has at tp {tp}: its real size decides, and no file tells it"
        yield fault(what, "name a checkpoint of that tp: --like DIR")
    for name, held in content.weights.items():
        axis = axis_of(name, tp)
        if axis is None or held.dtype is not next(iter(content.weights.values())).dtype:
            what = (
                f"{name}: how it is cut over tensor-parallel ranks is not known, or it is of another type than others"
            )
            yield fault(what, "--to megatron, which Megatron-LM loads under any tp and pp")
        elif axis >= 0 and name not in _VOCABULARY and held.shape[axis] % (2 * tp if ".linear_fc1." in name else tp):
            yield fault(f"{name}: its shape {list(held.shape)} does not divide by tp {tp}", "another --tp")
    heads = arguments.get("num_query_groups" if arguments.get("group_query_attention") else "num_attention_heads")
    if not isinstance(heads, int) or heads % tp:
        yield fault(f"its {heads} heads, or groups of them, do not divide by tp {tp}", "another --tp")


@dataclass(frozen=True, kw_only=True)
class _Writing:
    content: Content
    shown: Shown
    arguments: Mapping[str, object]
    tp: int
    pp: int
    rows: int
    step: object

    @cached_property
    def weights(self) -> dict[TensorKey, Placement]:
        """Each parameter as the ranks cut it."""
        made = {}
        for key, held in self.content.tensors.items():
            if key.kind == WEIGHT:
                shape = (self.rows, *held.shape[1:]) if key.name in _VOCABULARY else held.shape
                axis = axis_of(key.name, self.tp)
                assert axis is not None
                ranks = range(self.tp if axis >= 0 else 1)
                boxes = [box for at in ranks for box in boxes_of(key.name, shape, axis, at, self.tp, self.arguments)]
                made[key] = tiled(key, shape, held.dtype, [(0, 0, box) for box in boxes], family="", buffer="")
        return made

    @cached_property
    def ranks(self) -> list[tuple[FlatRank, list[Bucket]]]:
        return [(rank, held) for rank, _, held in laid_out(self.arguments, self.weights, chained=False)]

    @cached_property
    def kinds(self) -> list[str]:
        """The states that lie in flat buffers."""
        return list(dict.fromkeys(key.kind for key in self.content.tensors if key.kind != WEIGHT))

    @cached_property
    def placements(self) -> dict[TensorKey, Placement]:
        """Every copy of every tensor: of the vocabulary the rows that both sides have; the rest is padding."""
        tiles: dict[TensorKey, list[Tile]] = {}
        seen: dict[tuple[str, tuple[Box, ...]], int] = {}
        for shard, (_, buckets) in enumerate(self.ranks):
            bases = accumulate((bucket.unpadded for bucket in buckets), initial=0)
            for bucket, base in zip(buckets, bases, strict=False):
                for at, slot in bucket.slots:
                    copy = seen.get((slot.name, slot.boxes), 0)
                    seen[slot.name, slot.boxes] = copy + 1
                    for kind, origin in ((WEIGHT, 0), *((kind, base + at) for kind in self.kinds)):
                        key = TensorKey(name=slot.name, kind=kind, copy=copy)
                        if key._replace(copy=0) in self.content.tensors:
                            tiles.setdefault(key, []).extend(self._tiles(shard, origin, slot))
        return {key: self._placed(key, held) for key, held in tiles.items()}

    def _placed(self, key: TensorKey, tiles: Sequence[Tile]) -> Placement:
        held: Held = self.content.tensors[key._replace(copy=0)]
        shape, buffer = held.shape, str(key._replace(copy=0)) if key.kind == WEIGHT else key.kind
        if key.name in _VOCABULARY:
            shape = (min(self.rows, shape[0]), *shape[1:])
        dtype = held.dtype if key.kind == WEIGHT else ElementType.FLOAT32
        return tiled(key, shape, dtype, tiles, family=_FAMILY, buffer=buffer)

    def _tiles(self, shard: int, origin: int, slot: Slot) -> Iterator[Tile]:
        """Where a slot's boxes lie: of the vocabulary as far as the source has rows."""
        for box in slot.boxes:
            size, rows = box.size, self.content.tensors[TensorKey(name=slot.name, kind=WEIGHT)].shape[0]
            if slot.name in _VOCABULARY:
                size = (max(0, min(box.size[0], rows - box.offset[0])), *size[1:])
            if size[0]:
                yield shard, origin, Box(offset=box.offset, size=size)
            origin += box.numel

    def units(self) -> Iterator[Unit]:
        for shard, (rank, buckets) in enumerate(self.ranks):
            stage = f"_{rank.stage:03d}" if self.pp > 1 else ""
            folder = f"mp_rank_{rank.number:02d}{stage}"
            model = TargetFile(name=f"{folder}/{MODEL}", tree=partial(self._model, rank, buckets))
            flat = TargetFile(name=f"{folder}/{FLAT_FILE}", tree=partial(self._flat, buckets))
            yield Unit(family=_FAMILY, shard=shard, files=(model, flat))

    def _model(self, rank: FlatRank, buckets: Sequence[Bucket]) -> object:
        """What `generate_state_dict` of one rank gives."""
        slots = [slot for bucket in buckets for _, slot in bucket.slots][::-1]
        model: OrderedDict[str, object] = OrderedDict()
        for slot in slots:
            key = TensorKey(name=slot.name, kind=WEIGHT)
            shape = (sum(box.size[0] for box in slot.boxes), *slot.boxes[0].size[1:])
            name = self._local(slot, rank)
            model[name] = new_tensor(str(key), shape, self.weights[key].dtype)
            stem = name.removesuffix(".weight")
            if stem.rpartition(".")[2] in _STATEFUL:
                model[f"{stem}._extra_state"] = None
        if rank.stage == self.pp - 1:
            model["output_layer._extra_state"] = None
        place = rank.number + rank.stage * self.tp * self._dp
        namespace = ObjectRecord(
            callable=GlobalName(module="argparse", name="Namespace"),
            by_new=True,
            state={**self.arguments, "rank": place},
            has_state=True,
        )
        left = ("args", "content_metadata", "rerun_state_machine", "optimizer")
        made = {name: value for name, value in self.shown.common.items() if name not in left}
        made |= {"args": namespace, "model": model}
        groups = [group_with(group, self.step) for groups in self.shown.chain or () for group in groups]
        made["optimizer"] = {"optimizer": {"param_groups": groups}}
        random = self.shown.objects.get(f"rng_state/shard_{rank.stage}.{rank.number}_{self.pp}.{self.tp}")
        return made if random is None else {**made, "rng_state": random[0]}

    @property
    def _dp(self) -> int:
        size = self.arguments["data_parallel_size"]
        assert isinstance(size, int)
        return size

    def _local(self, slot: Slot, rank: FlatRank) -> str:
        """The name in one rank's model."""
        match = LAYER.fullmatch(slot.name)
        if match is None:
            return "output_layer.weight" if slot.shared and rank.stage else slot.name
        layers, rest = self.arguments["num_layers"], match[2]
        assert isinstance(layers, int)
        for own, other in LOCAL.items():
            rest = own + rest.removeprefix(other) if rest.startswith(other) else rest
        return f"decoder.layers.{int(match[1]) - rank.stage * (layers // self.pp)}.{rest}"

    def _flat(self, buckets: Sequence[Bucket]) -> object:
        """`get_parameter_state_dp_zero`: a buffer of each state, without the padding at the end of each bucket."""
        numel = sum(bucket.unpadded for bucket in buckets)
        dtype = next(iter(self.weights.values())).dtype
        fp32 = dtype is ElementType.FLOAT32 or self.arguments.get("accumulate_allreduce_grads_in_fp32")
        types = tuple(
            GlobalName(module="torch", name=one.label) for one in (dtype, ElementType.FLOAT32 if fp32 else dtype)
        )
        held: dict[str, object] = {
            _KIND.get(kind, kind): new_tensor(kind, (numel,), ElementType.FLOAT32) for kind in self.kinds
        }
        return {"buckets_coalesced": True, 0: {types: {**held, "numel_unpadded": numel}}}


_STATEFUL = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")
"""Modules of local layers that have a state, which is None."""
