"""Checkpoints of Megatron-LM as the door knows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import BACKEND, backend_of, is_megatron_fsdp, is_megatrons
from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.megatron.adoption import adopt
from ds_reshard.formats.megatron.checkpoint import TRACKER, arguments_of, iteration_name
from ds_reshard.formats.megatron.flat_states import RESAVE, size_of
from ds_reshard.formats.megatron.fsdp_dtensor import FsdpDtensor, list_fsdp_dtensor, open_fsdp_dtensor
from ds_reshard.formats.megatron.shifts import Shifts
from ds_reshard.formats.megatron.target import Shown, megatron_target, step_of, target_faults
from ds_reshard.formats.megatron.torch_dist import TorchDist, list_torch_dist, open_torch_dist
from ds_reshard.formats.megatron.torch_format import TorchFormat, is_torch_format, list_torch_format, open_torch_format
from ds_reshard.formats.megatron.torch_target import torch_format_target
from ds_reshard.model.checkpoint import Checkpoint, Format, Listing, SavedCheckpoint, SavedListing, checksums
from ds_reshard.model.content import MASTER, WEIGHT, Content, Path
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Holder, TensorKey
from ds_reshard.model.records import GlobalName
from ds_reshard.model.target import ConversionRequest, Target

TO, TORCH = WRITES = ("megatron", "megatron-torch")


class OpenedMegatron(SavedCheckpoint):
    framework = "Megatron-LM"
    state: TorchDist | TorchFormat
    mismatch_mend = (
        "Megatron-LM core 0.15 to 0.19 saves states that are shifted where a buffer has several buckets: save it again "
        "without --dist-ckpt-optim-fully-reshardable, or take the weights alone: convert --to safetensors"
    )

    def __init__(self, state: TorchDist | TorchFormat, files: Mapping[str, int]) -> None:
        super().__init__(state, files)
        self.tp, self.pp = (_size(state, f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
        self.ep = _size(state, "expert_model_parallel_size") if state.arguments.get("num_experts") else None
        self.masters_are_cast = state.distributed

    def master_proof_faults(self) -> Iterator[Fault]:
        """Weights of a layer that are the same: were their states exchanged, nothing would show it.

        The order of Megatron's own layers was observed but for norms of queries and keys; that of Transformer Engine's
        is inferred, and needs the proof.
        """
        if not self.state.flat:
            return
        observed = self.state.arguments.get("transformer_impl") == "local"
        alike: dict[object, list[str]] = {}
        for key in self.layout.placements:
            layer = re.match(r"decoder\.layers\.\d+\.", key.name)
            if (
                key.kind == WEIGHT
                and layer is not None
                and (not observed or re.search(r"\.[qk]_layernorm\.", key.name))
            ):
                told = checksums(self.index, key)
                told = self.layout[key].shape if told == (self.layout, key) else told
                alike.setdefault((layer[0], told), []).append(key.name)
        for names in (names for names in alike.values() if len(names) > 1):
            others = ", ".join(names[1:])
            what = f"the weights are the same bits as those of {others}: nothing proves whose states are whose"
            yield UnsupportedLayout.fault(names[0], what, mend=RESAVE)

    def replicas(self) -> Mapping[Holder, Index]:
        return {holder: Index(layout, self.state) for holder, layout in self.state.replicas.items()}

    def content(self) -> Content:
        """All of it but random states; of the arguments those that are plain values."""
        content, arguments = super().content(), self.state.arguments
        held = {name: value for name, value in arguments.items() if _is_plain(value)}
        objects: dict[Path, object] = {**content.objects, ("args",): held}
        batch = arguments.get("global_batch_size")
        return replace(
            content,
            objects=objects,
            batch_size=batch if type(batch) is int else None,
            shape_notes=frozenset({_ROWS_STAY}),
            faults=(*content.faults, *self._ungrouped()),
        )

    def _ungrouped(self) -> tuple[Fault, ...]:
        mend = "--to safetensors or torch, for the weights"
        told = self.state.ungrouped
        return (UnsupportedLayout.fault(self.folder, told, mend=mend),) if told else ()

    def left_out(self) -> tuple[str, ...]:
        """What no other format has a place for."""
        odd = [name for name, value in self.state.arguments.items() if not _is_plain(value)]
        told = ["random states are left out: no other format has a place for them"]
        if any(".linear_qkv." in key.name for key in self.layout.placements):
            told.append(_ROWS_STAY)
        if odd:
            told.append(f"arguments that are no plain values are left out: {', '.join(odd)}")
        if self.state.arguments.get("fp16"):
            told.append("the loss scaler's state is left out")
        if self.state.arguments.get("fp8"):
            told.append("scales of fp8 layers (_extra_state) are left out")
        return tuple(told)

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        """Its own format anew, with all that no other has a place for; that of Megatron-FSDP is not written."""
        if asked.to not in WRITES or isinstance(self.state, FsdpDtensor):
            return None
        content, shown = super().content(), self.state.shown
        faults = [*content.faults, *target_faults(content, shown)]
        raise_faults(faults, subject=f"converting {content.folder} to {asked.to}")
        shifts = self.state.shifts if isinstance(self.state, TorchDist) else None
        return _target(content, shown, asked, like, shifts)

    def repair(self) -> Checkpoint:
        if not isinstance(self.state, TorchDist) or self.state.flat or not self.state.distributed:
            return super().repair()
        return OpenedMegatron(self.state.repair(), self.files)

    def mismatch_mend_for(self, name: str) -> str:
        """For what Megatron-LM saves shifted, how much of it `repaired` puts back."""
        return self._mends.get(name, self.mismatch_mend)

    @cached_property
    def _mends(self) -> dict[str, str]:
        if not isinstance(self.state, TorchDist) or self.state.flat or not self.state.distributed:
            return {}
        shifts, made = self.state.find_shifts(), {}
        for name in {key.name for key in shifts.tiles} if not shifts.faults else ():
            lost = sum(box.numel for box in shifts.lost.get(TensorKey(name=name, kind=MASTER), ()))
            made[name] = (
                f"ds-reshard convert {self.folder} OUT --to {TO} --repair, if Megatron-LM has shifted it: puts all but "
                f"{lost} elements back; masters of those are the weights, moments zero"
            )
        return made

    def values(self) -> Mapping[str, Mapping[str, object]]:
        """Arguments and counters, and the random states of each rank."""
        return {**super().values(), "random states": self.state.random_states()}


def _size(state: TorchDist | TorchFormat, name: str) -> int | None:
    value = state.arguments.get(name)
    return value if type(value) is int else None


def _is_plain(value: object) -> bool:
    """Whether any framework reads the value back: numbers, texts, types of torch, and lists and dicts of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, GlobalName):
        return value.module == "torch"
    return value is None or isinstance(value, bool | int | float | str)


def _write(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    """Any content as a checkpoint of Megatron-LM, of the arguments that came along or those of --like."""
    raise_faults([*faults, *content.faults], subject=f"converting {content.folder} to {asked.to}")
    told = _megatron(asked, like)
    weights = told.layout.placements.items() if told is not None else ()
    shapes = {key.name: placement.shape for key, placement in weights if key.kind == WEIGHT}
    shown = adopt(content, told.state.shown if told is not None else None, shapes or None)
    raise_faults(list(target_faults(content, shown)), subject=f"converting {content.folder} to {asked.to}")
    target = _target(content, shown, asked, like, None)
    notes = [_NO_RANDOM] if "args" in content.entries else [_NO_RANDOM, f"{_ROWS}: they were taken to be so"]
    return replace(target, notes=(*target.notes, *notes, *content.notes))


def _target(
    content: Content, shown: Shown, asked: ConversionRequest, like: Checkpoint | None, shifts: Shifts | None
) -> Target:
    told, dp = _megatron(asked, like), (content.ranks or 1) if asked.dp is None else asked.dp
    if asked.to == TO:
        return megatron_target(content, shown, dp, asked.ep, shifts)
    saved = arguments_of(shown.common.get("args"))
    tp, pp, ep = (
        given or size_of(saved, f"{name}_model_parallel_size")
        for given, name in ((asked.tp, "tensor"), (asked.pp, "pipeline"), (asked.ep, "expert"))
    )
    rows = told.state.arguments.get("padded_vocab_size") if told is not None else None
    known = rows if isinstance(rows, int) else None
    return torch_format_target(content, shown, tp=tp, pp=pp, ep=ep, dp=dp, rows=known, step=step_of(content))


def _megatron(asked: ConversionRequest, like: Checkpoint | None) -> OpenedMegatron | None:
    if like is not None and not isinstance(like, OpenedMegatron):
        raise ConfigError(f"--like {asked.like}: is no checkpoint of Megatron-LM; name one, or leave it out")
    return like


_ROWS = "the rows of linear_qkv are Megatron-LM's: of each query group its queries, its key and its value"
_ROWS_STAY = f"{_ROWS}, also under other names"
_NO_RANDOM = "no random states are written: those of the coming run are what its --seed makes"


def _list(folder: str) -> SavedListing | None:
    if is_megatrons(folder):
        return list_torch_dist(folder)
    if is_megatron_fsdp(folder):
        return list_fsdp_dtensor(folder)
    if is_torch_format(folder):
        return list_torch_format(folder)
    backend = backend_of(folder) if BACKEND in folders.names(folder) else None
    if backend is not None and backend != "torch_dist":
        what, mend = (
            f"is a checkpoint of format {backend[:40]}",
            "load it with the Megatron-LM that saved it, and save it",
        )
        fault = UnsupportedLayout.fault(folder, what, "torch_dist", mend=f"{mend} with --ckpt-format torch_dist")
        raise_faults([fault], subject=f"checkpoint {folder}")
    return None


def _open(listing: Listing, *, optimizer: bool = True) -> OpenedMegatron:
    opened: Callable[..., TorchDist | TorchFormat] = open_torch_format
    if is_megatrons(listing.folder):
        opened = open_torch_dist
    elif is_megatron_fsdp(listing.folder):
        opened = open_fsdp_dtensor
    return OpenedMegatron(opened(listing.folder, optimizer=optimizer), listing.nbytes)


MEGATRON = Format(
    name="Megatron-LM",
    list=_list,
    open=_open,
    open_weights=partial(_open, optimizer=False),
    writes=dict.fromkeys(WRITES, _write),
    sized=frozenset(WRITES),
    latest={TRACKER: iteration_name},
)
