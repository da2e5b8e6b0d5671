"""A checkpoint to be written, in any format: a layout, the source of each tensor, and a tree for each file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.model.layout import Layout, TensorKey


class RunSizes(NamedTuple):
    """The number of ranks of a run along each axis; expert-parallel ranks are among the data-parallel ranks."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """A file to be written. `container` is "torch", "safetensors", "archives" (several of torch in one) or "plain".

    `data` has the bytes of buffers that are not read from the source, such as step counters.

    `tree` returns the value to be saved, as torch.save would get it: storages without a path are buffers of the target,
    by their key; all others are copied. It is called only when the file is written, as a checkpoint may have thousands
    of files. `metadata` is the text that a safetensors file carries.
    """

    name: str
    tree: Callable[[], object]
    data: Mapping[str, bytes] = field(default_factory=dict)
    container: str = "torch"
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The files of one shard of a family, which are written together."""

    family: str
    shard: int
    files: tuple[TargetFile, ...]

    @property
    def name(self) -> str:
        return f"{self.family}-{self.shard}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint to be written; `sources` maps each tensor of the layout to the source tensor that it is read from.

    `source_layout` has the places of these source tensors if a map has changed their shapes; None if the source has.

    `padding` has the tensors of that layout that the map leaves out, by the note that says so.

    `folder` is the folder of the files in the output; `pointers` are small files next to it, by name. `notes` tell the
    user what the files contain or lack. `basis` maps arguments (such as --like) to checksums of the files that they
    name, from which the target was made. `sizes` are those of the coming run, if the format depends on them.
    """

    layout: Layout
    sources: Mapping[TensorKey, TensorKey]
    units: Sequence[Unit]
    folder: str = ""
    pointers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    basis: Mapping[str, str] = field(default_factory=dict)
    sizes: RunSizes | None = None
    source_layout: Layout | None = None
    padding: Mapping[str, Sequence[TensorKey]] = field(default_factory=dict)


WEIGHTS = ("safetensors", "torch")
"""The formats of plain weights, which may be written in another type than that of training: one of DTYPES."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """The arguments of a conversion; None means "as saved".

    `tp` and `pp` are for DeepSpeed, nanotron and Megatron-LM, `ep` for DeepSpeed and Megatron-LM, `zero_stage` for
    nanotron. `like` is a checkpoint that shows how the coming run arranges its model; `repair` corrects a known fault
    of the framework that saved; `names` is the path of a map of parameter names.
    """

    to: str
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero_stage: int | None = None
    like: str | None = None
    sub_group_size: int | None = None
    dtype: str | None = None
    names: str | None = None
    repair: bool = False

    @property
    def weights_only(self) -> bool:
        """True if nothing of the optimizer is read or written; with a `dtype`, weights are cast from the masters."""
        return self.to == "safetensors" and self.dtype is None
