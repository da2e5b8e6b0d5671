"""The arguments of a run that Megatron-Bridge saved: `run_config.yaml` and `train_state.pt`, in place of `args`.

Names from `ConfigContainer` and `TrainState` (megatron/bridge/training/config.py and state.py, 0.6.2). The YAML names
classes and functions; they are read as text, and never looked up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from math import prod

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import Directory
from ds_reshard.containers.plain import read_scalars, single_elements
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, fail
from ds_reshard.model.facts import number_of
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, TensorRecord

CONFIG, STATE, LATEST_STATE = "run_config.yaml", "train_state.pt", "latest_train_state.pt"
_MOST_NBYTES = 1 << 20
_BLOCKS = ("checkpoint", "dist", "scheduler", "train", "ddp", "optimizer", "model")
"""The blocks that hold arguments; if two have a name, the later one counts."""
_NAMES = {
    "num_experts": ("model", "num_moe_experts"),
    "swiglu": ("model", "gated_linear_unit"),
    "decoder_first_pipeline_num_layers": ("model", "num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": ("model", "num_layers_in_last_pipeline_stage"),
    "ddp_bucket_size": ("ddp", "bucket_size"),
    "ddp_num_buckets": ("ddp", "num_buckets"),
    "ddp_pad_buckets_for_high_nccl_busbw": ("ddp", "pad_buckets_for_high_nccl_busbw"),
    "accumulate_allreduce_grads_in_fp32": ("ddp", "grad_reduce_in_fp32"),
    "apply_layernorm_1p": ("model", "layernorm_zero_centered_gamma"),
}
"""Where the arguments of Megatron-LM lie that have another name there: (block, name)."""
_NOT = {
    "untie_embeddings_and_output_weights": ("model", "share_embeddings_and_output_weights"),
    "no_save_optim": ("checkpoint", "save_optim"),
    "no_save_rng": ("checkpoint", "save_rng"),
}
"""The same of those that say the opposite."""
_POINT = re.compile(r"\.(?=inf|nan)", re.IGNORECASE)
_WRITTEN = re.compile(r"__([0-9]+)_[0-9]+\.distcp$")
_WORDS = "embedding.word_embeddings.weight"


def with_arguments(folder: str, common: Mapping[object, object], directory: Directory) -> Mapping[object, object]:
    """Return what all ranks share, with `args` and the count of operations as Megatron-LM saves them.

    Neither file has `padded_vocab_size` and `world_size`: the directory has the rows of the embedding, and the ranks
    that wrote parts of the optimizer's flat buffers. Raises CheckpointDamaged for files that are not as Bridge writes
    them, and for a `train_state.pt` of another iteration.
    """
    config, state = _config(os.path.join(folder, CONFIG)), train_state(os.path.join(folder, STATE))
    path = os.path.join(folder, STATE)
    if state["step"] != common.get("iteration"):
        found = f"{state['step']} beside iteration {common.get('iteration')} of the other files"
        raise fail(path, "belongs to another iteration", "step of the same", found)
    arguments: dict[object, object] = {}
    for block in _BLOCKS:
        arguments |= {name: value for name, value in config[block].items() if not str(name).startswith("_")}
    arguments |= {name: config[block].get(other) for name, (block, other) in _NAMES.items()}
    arguments |= {name: not config[block].get(other, True) for name, (block, other) in _NOT.items()}
    plain = (None, arguments.get("num_attention_heads"))
    arguments["group_query_attention"] = arguments.get("num_query_groups") not in plain
    arguments |= {"iteration": state["step"], "consumed_train_samples": state["consumed_train_samples"]}
    words = directory.tensors.get(_WORDS)
    arguments["padded_vocab_size"] = words.shape[0] if words is not None else None
    sizes = (
        arguments.get(f"{name}_size")
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    others = prod(size if type(size) is int and size > 0 else 1 for size in sizes)
    if (ranks := _ranks(directory)) and ranks % others == 0:
        arguments |= {"world_size": ranks, "data_parallel_size": ranks // others}
    namespace = ObjectRecord(
        callable=GlobalName(module="argparse", name="Namespace"), by_new=True, state=arguments, has_state=True
    )
    operations = state["floating_point_operations_so_far"]
    return {**common, "num_floating_point_operations_so_far": operations, "args": namespace}


def _ranks(directory: Directory) -> int:
    """Return the number of ranks that wrote flat buffers of the optimizer, each to its own files; 0 if unknown."""
    flat = (one for key, one in directory.tensors.items() if ".bucket_idx_" in key)
    paths = {chunk.place.path for one in flat for chunk in one.filled if chunk.place is not None}
    ranks = {int(found[1]) for path in paths if (found := _WRITTEN.search(path))}
    return len(ranks) if ranks == set(range(len(ranks))) else 0


_MEND = "restore it, or move it away to take the weights alone (convert --to safetensors)"


def _config(path: str) -> dict[str, dict[object, object]]:
    """Return the blocks of a run's configuration; every value is a plain one, or a type of torch."""
    import yaml  # only these folders need it

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        """One without merge keys, which a few bytes make endless, and with decimal numbers alone, as they are saved."""

        def flatten_mapping(self, node: object) -> None:
            pass

    PlainLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
    PlainLoader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(_POINT.sub("", node.value)))
    text = folders.read_small(path, _MOST_NBYTES + 1)
    if len(text) > _MOST_NBYTES:
        raise _wrong(path, "is larger than any configuration", f"{_MOST_NBYTES} bytes at most", "more")
    try:
        read = yaml.load(text, PlainLoader)  # that of libyaml ends the process if nesting is deep
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise _wrong(path, "is no YAML of plain values", "no tags or merge keys", reason) from error
    blocks = read if isinstance(read, dict) else {}
    if lacking := [name for name in _BLOCKS if not isinstance(blocks.get(name), dict)]:
        raise _wrong(path, f"has no block {lacking[0]}", ", ".join(_BLOCKS), ", ".join(map(str, blocks))[:160])
    return {
        block: {name: plain for name, value in blocks[block].items() if (plain := _plain(value)) is not _NO_VALUE}
        for block in _BLOCKS
    }


def _wrong(path: str, what: str, expected: str, found: str) -> CheckpointDamaged:
    return CheckpointDamaged.of(path, what, expected, found, mend=_MEND)


_NO_VALUE = object()
_TYPES = {f"torch.{one.label}" for one in ElementType}


def _plain(value: object) -> object:
    """Return a value of the YAML if it is plain, a list of plain ones or a type of torch; `_NO_VALUE` otherwise."""
    if isinstance(value, dict) and str(value.get("_target_")) in _TYPES and value.get("_call_") is False:
        return GlobalName(module="torch", name=str(value["_target_"]).removeprefix("torch."))
    if isinstance(value, list):
        return value if all(one is None or isinstance(one, bool | int | float | str) for one in value) else _NO_VALUE
    return value if value is None or isinstance(value, bool | int | float | str) else _NO_VALUE


def train_state(path: str) -> dict[str, int | float | None]:
    """Return the tensors of one element of a `train_state.pt` by name, None for a bool.

    Raises CheckpointDamaged if the step, the samples or the operations are missing.
    """
    with open_archive(path) as archive:
        held = archive.load()
    tensors = held if isinstance(held, dict) else {}
    values = read_scalars(path, single_elements(tensors.values()))
    found = {
        str(name): number_of(values[one])
        for name, one in tensors.items()
        if isinstance(one, TensorRecord) and one in values
    }
    for name in ("step", "consumed_train_samples", "floating_point_operations_so_far"):
        if name not in found:
            raise fail(path, f"has no {name}", "a tensor of one element", "none")
    return found


def notes(folder: str, tracker: str) -> Iterator[str]:
    """Yield a note if Bridge would resume from another iteration than the one that the file `tracker` names.

    It goes by `latest_train_state.pt`, and writes that first: a save that was killed between both leaves them apart.
    """
    above = os.path.dirname(folder)
    paths = [os.path.join(above, name) for name in (LATEST_STATE, tracker)]
    if all(map(folders.is_file, paths)):
        step = train_state(paths[0])["step"]
        tracked = folders.read_small(paths[1], 20).decode("utf-8", errors="replace").strip()
        if str(step) != tracked:
            yield f"Megatron-Bridge would resume at {step}, by {paths[0]}; {tracker} names {tracked}"
