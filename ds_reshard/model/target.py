"""A checkpoint that is to be written, of whatever format: a layout, the source of each tensor, a tree for each file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.model.layout import Layout, TensorKey


class RunSizes(NamedTuple):
    """How many ranks a run has along each axis; those of expert parallelism are among the data-parallel ones."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFile:
    """One file, of torch or safetensors (`container`), "archives": several of torch in one, or "plain": bytes.

    `data` fills buffers that no tensor does.

    `tree` gives what torch.save would be given: storages without a path are buffers, by their key, all others are
    copied. It is built when it is asked for: a checkpoint may have thousands.
    `metadata` is the text that safetensors keeps beside its tensors.
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
    """What is to be written: `wants` gives the source tensor of each of the layout's.

    `folder` is where the files lie in the output, `pointers` are small files beside it, by name; `notes` is what the
    user should know of what the files hold, and what not. `basis` has, by the argument that named it, a checksum of
    what the target was made from beside the source. `sizes` are those of the coming run, where a format has them.
    """

    layout: Layout
    sources: Mapping[TensorKey, TensorKey]
    units: Sequence[Unit]
    folder: str = ""
    pointers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    basis: Mapping[str, str] = field(default_factory=dict)
    sizes: RunSizes | None = None


WEIGHTS = ("safetensors", "torch")
"""The formats of plain tensors, which may have another type than was trained in: one of DTYPES."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """What a conversion is to write; None is as it was saved.

    `tp` and `pp` are of DeepSpeed, nanotron and Megatron-LM, `ep` of the first and the last, `zero_stage` of nanotron;
    `like` is a checkpoint that shows how the coming run arranges its model; with `repair` what a framework has saved
    wrong is put right; `names` is the path of a map of parameters' names.
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
        """Whether nothing of the optimizer is written: a type of its own is cast from the masters."""
        return self.to == "safetensors" and self.dtype is None
