"""A checkpoint of Megatron-LM's format `torch` that is to be written, for stock Megatron-LM at one tp, pp and ep.

A folder of each model-parallel rank with its pieces and its flat buffers, laid out as `buckets.py` says. Of layers of
`--transformer-impl local`, the order of which was observed (`torch_format.py` reads the same).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.buckets import Bucket, Slot
from ds_reshard.formats.megatron.checkpoint import MODEL, TRACKER, Group, arguments_of, iteration_name
from ds_reshard.formats.megatron.flat_states import laid_out, size_of, unplaced, unsupported
from ds_reshard.formats.megatron.optimizer import EXPERTS
from ds_reshard.formats.megatron.target import Shown, chained, group_with
from ds_reshard.formats.megatron.torch_format import FLAT_FILE, LAYER, LOCAL, axis_of, boxes_of, odd_experts, places
from ds_reshard.model.content import MASTER, WEIGHT, Content, TensorSource
from ds_reshard.model.layout import Layout, Placement, TensorKey, Tile, tiled_placement
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, TensorRecord, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import Target, TargetFile, Unit

_FAMILY = "model-parallel ranks"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_KIND = {MASTER: "param"}


def torch_format_target(
    content: Content, shown: Shown, *, tp: int, pp: int, ep: int, dp: int, rows: int | None, step: object
) -> Target:
    """The folders; `rows` is the vocabulary's size with its padding there, None where the source tells it.

    Experts are cut over as many tensor-parallel ranks as the dense parameters.

    Raises UnsupportedLayout, with every reason, for what no file tells or the sizes do not divide.
    """
    saved = arguments_of(shown.common.get("args"))
    padded = rows if rows is not None else _rows(saved, tp)
    sizes = {"tensor": tp, "pipeline": pp, "virtual_pipeline": None, "expert": ep}
    arguments = saved | {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    arguments |= {
        "expert_tensor_parallel_size": tp,
        "data_parallel_size": dp,
        "context_parallel_size": 1,
        "world_size": tp * pp * dp,
    }
    arguments |= {"padded_vocab_size": padded, "use_distributed_optimizer": True, "sequence_parallel": False}
    arguments |= dict.fromkeys(_OF_STAGES)
    faults = [*_unsupported(content, arguments, tp), *_by_name(unsupported(content.folder, arguments))]
    raise_faults(faults, subject=f"converting {content.folder} to megatron-torch")
    assert padded is not None
    chain = chained(shown.chain, ep if arguments.get("num_experts") else None, content)
    writing = _Writing(
        content=content, shown=shown, arguments=arguments, chain=chain, tp=tp, pp=pp, ep=ep, rows=padded, step=step
    )
    known = {slot.name for folder in writing.folders for slot in folder.slots}
    left = _by_name(unplaced(content.folder, writing.weights, known))
    raise_faults(list(left), subject=f"converting {content.folder} to megatron-torch")
    iteration = str(shown.common.get("iteration", content.steps))
    held = f"rng_state/shard_0.0_{pp}.{tp}" in shown.objects and ep == 1
    return Target(
        layout=Layout(writing.placements, {_FAMILY: tp * pp * ep}),
        sources={key: content.tensors[key._replace(copy=0)].origin for key in writing.placements},
        units=list(writing.units()),
        folder=iteration_name(iteration),
        pointers={TRACKER: iteration},
        notes=() if held else ("random states of this tp, pp and ep were not saved: give the run --no-load-rng",),
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

    told = ["Transformer Engine"] * (arguments.get("transformer_impl") != "local")
    for name in told + (odd_experts(arguments) if arguments.get("num_experts") else []):
        yield fault(f"with {name} no folder of format torch is written", _ANY)
    ep, dp = arguments["expert_model_parallel_size"], arguments["data_parallel_size"]
    if not arguments.get("num_experts") and ep != 1:
        yield fault("has no experts that could be divided", "leave out --ep")
    elif dp % ep:  # type: ignore[operator]
        yield fault(f"experts of {ep} ranks do not divide the {dp} data-parallel ranks", f"--dp {ep}, or a multiple")
    if arguments["padded_vocab_size"] is None:
        what = f"does not tell how many rows its vocabulary has at tp {tp}: its real size decides, and no file tells it"
        yield fault(what, f"name a checkpoint of that tp: --like DIR; or {_ANY}")
    for name, held in content.weights.items():
        axis = axis_of(name, tp)
        if axis is None or held.dtype is not next(iter(content.weights.values())).dtype:
            what = (
                f"{name}: how it is cut over tensor-parallel ranks is not known, or it is of another type than others"
            )
            yield fault(what, _ANY)
        elif axis >= 0 and name not in _VOCABULARY:
            axis += EXPERTS in f".{name}"
            if held.shape[axis] % (2 * tp if ".linear_fc1." in name else tp):
                yield fault(f"{name}: its shape {list(held.shape)} does not divide by tp {tp}", "another --tp")
    heads = arguments.get("num_query_groups" if arguments.get("group_query_attention") else "num_attention_heads")
    if not isinstance(heads, int) or heads % tp:
        yield fault(f"its {heads} heads, or groups of them, do not divide by tp {tp}", "another --tp")


def _by_name(faults: Iterable[Fault]) -> Iterator[Fault]:
    """The same of what has no place in a flat buffer, mended by a format whose states go by name."""
    return (replace(one, mend=_ANY) for one in faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """A model-parallel rank: its place, its buckets, and apart those of experts with an optimizer of their own.

    The dense parameters' states are saved by the first of the ranks that share them.
    """

    name: str
    tp: int
    stage: int
    ep: int
    buffers: tuple[Sequence[Bucket], ...]

    @property
    def slots(self) -> list[Slot]:
        """In the order of the model, but for experts apart, which come last."""
        return [slot for held in self.buffers for bucket in held[::-1] for _, slot in bucket.slots[::-1]]

    def saves(self, buffer: int) -> bool:
        return bool(buffer) or not self.ep


@dataclass(frozen=True, kw_only=True)
class _Writing:
    content: Content
    shown: Shown
    arguments: Mapping[str, object]
    chain: Sequence[Sequence[Group]]
    tp: int
    pp: int
    ep: int
    rows: int
    step: object

    @cached_property
    def weights(self) -> dict[TensorKey, Placement]:
        """Each parameter as the ranks cut it."""
        made = {}
        for key, held in self.content.tensors.items():
            if key.kind == WEIGHT:
                shape = (self.rows, *held.shape[1:]) if key.name in _VOCABULARY else held.shape
                made[key] = tiled_placement(key, shape, held.dtype, self._cut(key.name, shape), family="", buffer="")
        return made

    def _cut(self, name: str, shape: tuple[int, ...]) -> Iterator[Tile]:
        axis, of_experts = axis_of(name, self.tp), EXPERTS in f".{name}"
        assert axis is not None
        for at in range(self.tp if axis >= 0 else 1):
            for box in boxes_of(name, shape[of_experts:], axis, at, self.tp, self.arguments):
                if not of_experts:
                    yield 0, 0, box
                for expert in range(shape[0] if of_experts else 0):
                    yield 0, 0, Box(offset=(expert, *box.offset), size=(1, *box.size))

    @property
    def _experts(self) -> int:
        """How many of each layer a rank has."""
        return size_of(self.arguments, "num_experts") // self.ep

    @cached_property
    def folders(self) -> list[_Folder]:
        dense: dict[tuple[int, int], Sequence[Bucket]] = {}
        apart: dict[tuple[int, int, int], Sequence[Bucket]] = {}
        for rank, _, buckets in laid_out(self.arguments, self.weights, chained=self.ep > 1):
            if rank.dense:
                dense[rank.number, rank.stage] = buckets
            else:
                apart[rank.number, rank.stage, rank.experts.start // self._experts] = buckets
        made = []
        for name, (t, p, e) in places(self.arguments).items():
            buffers = (dense.get((t, p), ()), *([apart.get((t, p, e), ())] if apart else []))
            made.append(_Folder(name=name, tp=t, stage=p, ep=e, buffers=buffers))
        return made

    @cached_property
    def kinds(self) -> list[str]:
        """The states that lie in flat buffers."""
        return list(dict.fromkeys(key.kind for key in self.content.tensors if key.kind != WEIGHT))

    @cached_property
    def placements(self) -> dict[TensorKey, Placement]:
        """Every copy of every tensor: of the vocabulary the rows that both sides have; the rest is padding."""
        tiles: dict[TensorKey, list[Tile]] = {}
        seen: dict[tuple[str, str, tuple[Box, ...]], int] = {}
        for shard, folder in enumerate(self.folders):
            for number, buckets in enumerate(folder.buffers):
                kinds = self.kinds if folder.saves(number) else ()
                bases = accumulate((bucket.unpadded for bucket in buckets), initial=0)
                for bucket, base in zip(buckets, bases, strict=False):
                    for at, slot in bucket.slots:
                        weight = (self._expert(slot, folder) or 0) * slot.numel
                        for kind, origin in ((WEIGHT, weight), *((kind, base + at) for kind in kinds)):
                            copy = seen.get((slot.name, kind, slot.boxes), 0)
                            seen[slot.name, kind, slot.boxes] = copy + 1
                            key = TensorKey(name=slot.name, kind=kind, copy=copy)
                            if key._replace(copy=0) in self.content.tensors:
                                tiles.setdefault(key, []).extend(self._tiles(shard, origin, slot))
        return {key: self._placed(key, held) for key, held in tiles.items()}

    def _placed(self, key: TensorKey, tiles: Sequence[Tile]) -> Placement:
        held: TensorSource = self.content.tensors[key._replace(copy=0)]
        apart = self.ep > 1 and EXPERTS in f".{key.name}"
        shape, buffer = held.shape, str(key._replace(copy=0)) if key.kind == WEIGHT else _flat_name(key.kind, apart)
        if key.name in _VOCABULARY:
            shape = (min(self.rows, shape[0]), *shape[1:])
        dtype = held.dtype if key.kind == WEIGHT else ElementType.FLOAT32
        return tiled_placement(key, shape, dtype, tiles, family=_FAMILY, buffer=buffer)

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
        for shard, folder in enumerate(self.folders):
            model = TargetFile(name=f"{folder.name}/{MODEL}", tree=partial(self._model, folder))
            flat = TargetFile(name=f"{folder.name}/{FLAT_FILE}", tree=partial(self._flat, folder))
            yield Unit(family=_FAMILY, shard=shard, files=(model, flat))

    def _model(self, folder: _Folder) -> object:
        """What `generate_state_dict` of one rank gives."""
        model: OrderedDict[str, object] = OrderedDict()
        for slot in folder.slots:
            name = self._local(slot, folder)
            model[name] = self._tensor(slot, folder)
            stem = name.removesuffix(".weight")
            if stem.rpartition(".")[2] in _STATEFUL:
                model[f"{stem}._extra_state"] = None
        if folder.stage == self.pp - 1:
            model["output_layer._extra_state"] = None
        dp = size_of(self.arguments, "data_parallel_size")
        place = folder.tp + (folder.ep + folder.stage * dp) * self.tp
        namespace = ObjectRecord(
            callable=GlobalName(module="argparse", name="Namespace"),
            by_new=True,
            state={**self.arguments, "rank": place},
            has_state=True,
        )
        left = ("args", "content_metadata", "rerun_state_machine", "optimizer")
        made = {name: value for name, value in self.shown.common.items() if name not in left}
        made |= {"args": namespace, "model": model}
        states = [
            {"optimizer": {"param_groups": [group_with(group, self.step) for group in groups]}} for groups in self.chain
        ]
        made["optimizer"] = states[0] if len(states) == 1 else states
        random = self.shown.objects.get(f"rng_state/shard_{folder.stage}.{folder.tp}_{self.pp}.{self.tp}")
        return made if random is None or self.ep > 1 else {**made, "rng_state": random[0]}

    def _expert(self, slot: Slot, folder: _Folder) -> int | None:
        """Which of a rank's experts a slot is of."""
        return slot.boxes[0].offset[0] - folder.ep * self._experts if EXPERTS in f".{slot.name}" else None

    def _tensor(self, slot: Slot, folder: _Folder) -> TensorRecord:
        """A parameter of one rank; those of its experts lie behind each other in one storage."""
        key, expert = TensorKey(name=slot.name, kind=WEIGHT), self._expert(slot, folder)
        dtype = self.weights[key].dtype
        if expert is None:
            return new_tensor(str(key), (sum(box.size[0] for box in slot.boxes), *slot.boxes[0].size[1:]), dtype)
        shape = (self._experts, sum(box.size[1] for box in slot.boxes), *slot.boxes[0].size[2:])
        whole = new_tensor(str(key), shape, dtype)
        return replace(whole, element_offset=expert * slot.numel, shape=shape[1:], stride=whole.stride[1:])

    def _local(self, slot: Slot, folder: _Folder) -> str:
        """The name in one rank's model."""
        match, expert = LAYER.fullmatch(slot.name), self._expert(slot, folder)
        if match is None:
            return "output_layer.weight" if slot.shared and folder.stage else slot.name
        rest = match[3]
        if expert is not None:
            rest = rest.replace("mlp.experts.experts.", f"mlp.experts.local_experts.{expert}.", 1)
        for own, other in LOCAL.items():
            rest = own + rest.removeprefix(other) if rest.startswith(other) else rest
        layers = size_of(self.arguments, "num_layers") // self.pp
        return f"{match[1]}{int(match[2]) - folder.stage * layers}.{rest}"

    def _flat(self, folder: _Folder) -> object:
        """`get_parameter_state_dp_zero`: a buffer of each state, without the padding at the end of each bucket."""
        dtype = next(iter(self.weights.values())).dtype
        fp32 = dtype is ElementType.FLOAT32 or self.arguments.get("accumulate_allreduce_grads_in_fp32")
        types = tuple(
            GlobalName(module="torch", name=one.label) for one in (dtype, ElementType.FLOAT32 if fp32 else dtype)
        )
        made: list[object] = []
        for number, buckets in enumerate(folder.buffers):
            numel = sum(bucket.unpadded for bucket in buckets)
            held: dict[str, object] = {
                _KIND.get(kind, kind): new_tensor(_flat_name(kind, bool(number)), (numel,), ElementType.FLOAT32)
                for kind in self.kinds
            }
            state = {"buckets_coalesced": True, 0: {types: {**held, "numel_unpadded": numel}}}
            made.append(state if folder.saves(number) else None)
        return made[0] if len(made) == 1 else made


def _flat_name(kind: str, apart: bool) -> str:
    return f"{kind} of experts" if apart else kind


_OF_STAGES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""What a run says of its stages that are not all alike: those of the folder are."""
_ANY = "--to megatron without --tp and --pp, which Megatron-LM loads under any"
_STATEFUL = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")
"""Modules of local layers that have a state, which is None."""
