"""Whether ds_to_universal has mixed up the parameters of a run with `round_robin_gradients`.

It cuts by `param_slice_mappings`, which stages 1 and 2 make in another order than that of their flat buffers
(`DeepSpeedZeroOptimizer._create_param_mapping`, runtime/zero/stage_1_and_2.py, 0.19.8). With one rank the orders are
the same.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.errors import CheckpointDamaged, Fault
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.universal_files import StateFile
from ds_reshard.model.records import TensorRecord

_SAMPLED = 8


def scrambled(
    listing: Listing, model: ModelStates, names: Iterable[str], master: Callable[[str], StateFile | None]
) -> Iterator[Fault]:
    """A fault where the saved DeepSpeed JSON says so; where it was not saved, where masters are not of their weights.

    The JSON is not saved where DeepSpeed was given its path. Then the first elements of every master are compared with
    those of the weight, which is whole in the model file below stage 3.
    """
    config = model.entries.get("ds_config")
    if isinstance(config, dict):
        zero = config.get("zero_optimization")
        wrong = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    else:
        with open_archive(model.path) as weights:
            wrong = any(_differs(weights, model.module.get(name), master(name)) for name in names)
    if wrong:
        yield CheckpointDamaged.fault(
            listing.folder,
            "was converted of a run with round_robin_gradients, whose parameters ds_to_universal mixes up",
            "each parameter's own master and states",
            "parts of others",
            mend="load the ZeRO checkpoint that it was made from",
        )


def _differs(weights: TorchArchive, weight: TensorRecord | None, file: StateFile | None) -> bool:
    """Whether the first elements of a master are not those of its weight; False where this cannot be told."""
    if weight is None or file is None or file.tensor is None or file.tensor.dtype.label != "float32":
        return False
    if weight.dtype.label not in _ROUNDED or not weight.contiguous or not file.tensor.contiguous:
        return False
    numel = min(_SAMPLED, weight.numel, file.tensor.numel)
    with open_archive(file.path) as masters:
        values = masters.tensor_bytes(_first(file.tensor, numel))
    found = weights.tensor_bytes(_first(weight, numel))
    return b"".join(map(_ROUNDED[weight.dtype.label], struct.unpack(f"<{numel}I", values))) != found


def _first(tensor: TensorRecord, numel: int) -> TensorRecord:
    return replace(tensor, shape=(numel,), stride=(1,))


def _bfloat16(bits: int) -> bytes:
    """A float32, given as its bits, rounded to the nearest bfloat16, ties to even."""
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF).to_bytes(2, "little")


def _float16(bits: int) -> bytes:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", float("inf") if value > 0 else float("-inf"))


_ROUNDED: dict[str, Callable[[int], bytes]] = {
    "bfloat16": _bfloat16,
    "float16": _float16,
    "float32": lambda bits: bits.to_bytes(4, "little"),
}
