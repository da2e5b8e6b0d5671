"""What can be asked of a checkpoint without a running engine: the wiring of the rooms below."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_reshard.containers.pickle_rules import PickleRules, in_force, rules_in_force
from ds_reshard.containers.remote import fetched
from ds_reshard.errors import ConfigError, ReshardError, UnsupportedLayout, raise_faults
from ds_reshard.model.reports import ConversionPlan, Difference, Fingerprinted, Inspection, Naming, Verification
from ds_reshard.model.rules import Rule, parse_rules, rule_faults
from ds_reshard.model.target import ConversionRequest
from ds_reshard.operations.fingerprints import fingerprint
from ds_reshard.operations.formats import ZERO, is_megatron, read_megatron_past, read_zero_past
from ds_reshard.operations.inspection import describe
from ds_reshard.operations.naming import naming
from ds_reshard.operations.options import FORMATS, Conversion, Options, Progress, Reading, TargetOptions
from ds_reshard.operations.pickles import one_line_for_all, scan_files, scan_pickles, siblings, untold
from ds_reshard.operations.source import find_listing
from ds_reshard.resume import lr_preview, megatron
from ds_reshard.resume.lr_preview import ComingRun
from ds_reshard.resume.megatron import read_run

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "FORMATS",
    "ComingRun",
    "Conversion",
    "ConversionPlan",
    "Difference",
    "Fingerprinted",
    "Inspection",
    "Naming",
    "Options",
    "Progress",
    "Reading",
    "Verification",
    "coming_run",
    "convert",
    "diff",
    "fingerprint",
    "inspect",
    "names",
    "plan",
    "read_config",
    "read_rules",
    "scan_pickles",
    "verify",
]


def inspect(path: str, *, tag: str | None = None) -> Inspection:
    """What the checkpoint in `path` says about itself, and every fault of its files.

    `path` is the folder that was given to save_checkpoint (then `tag`, or what its file `latest` names, says
    which of its checkpoints), or the folder of one tag. Opens every shard and reads its directory and
    pickle, no tensor's bytes but scalars; neither imports torch nor executes anything from the files.

    Files beside those of the checkpoint, in its folder and in `path`, are searched for what acts in their pickles.

    Raises CheckpointNotFound when the path does not exist or holds no checkpoint, ReadFailed when the
    folder cannot be listed. Everything else that is wrong is in the `faults` of what is returned.
    """
    before = _bytes_asked_for()
    with in_force(PickleRules(rules_in_force().trusted)):
        found = find_listing(os.fspath(path), tag)
        made = replace(describe(found), bytes_read=_since(before))
        scanned = scan_files(siblings(os.fspath(path), found.folder))
    faults = (*made.faults, *untold(scanned.faults, made.faults))
    return replace(made, faults=faults, pickles=scanned.pickles, pickles_unread=scanned.unread)


def convert(
    path: str,
    out: str,
    *,
    to: str,
    tag: str | None = None,
    repair: bool = False,
    options: Options | None = None,
    progress: Progress | None = None,
    **wanted: Unpack[TargetOptions],
) -> Conversion:
    """Write the checkpoint in `path` (and `tag`, as for `inspect`) anew into the folder `out`.

    `to` is "zero1", "zero2", "zero3" or "bf16" (`BF16_Optimizer`): files that DeepSpeed itself loads at data-parallel
    size `dp`, which is the saving run's unless given, tensor-parallel size `tp` and expert-parallel size `ep`, 1 unless
    given; and, of "zero1" and "bf16", those of the `pp` stages of the PipelineModule that has saved `like`, a
    checkpoint that also shows how that run divides tensors and experts;
    or "universal": files that its `load_universal` loads;
    or "safetensors": weights in Hugging Face's layout; or "torch": a state dict of the weights, and one of each kind
    of state. Weights are of `dtype` ("float32", "bfloat16", "float16") from their masters, else as they were trained.
    `sub_group_size` is that of the coming run's JSON (stage 3), else the saving run's.
    Or "nanotron": files that nanotron itself loads at the sizes `dp`, `tp`, `pp` and `zero_stage` (0 or 1), each the
    saving run's unless given, or those of `like`, a checkpoint of the coming run, which must be given for DeepSpeed's.
    Between nanotron and DeepSpeed `names` is a JSON file of parameters' names: of the source, and of the output.
    Or "megatron": a `torch_dist` folder that Megatron-LM itself loads under any tp, pp and dp; `ep` is the coming run's
    expert-parallel size where one of the two runs has experts apart and the other has not. With `repair` states that
    Megatron-LM has saved shifted are put back; what is in no file is told in the notes.
    Or "megatron-torch": a folder of its format `torch`, which it loads at the sizes `tp` and `pp` alone.
    Or "fsdp", of a folder of EasyR1 or verl: files that they themselves load on `dp` ranks.
    Or "dcp": a folder of `dp` files that torch.distributed.checkpoint itself loads into FSDP2 and plain tensors; or
    "accelerate": the same as the two folders of accelerate's sharded FSDP2. Such folders are sources, too.

    Raises what a load raises for files that are missing or damaged, UnsupportedLayout for what the format cannot
    hold, ConfigError for a place that cannot be written to, WriteFailed. `out` is then not there.
    """
    from ds_reshard.operations.conversion import convert_listing  # which needs torch

    listing = find_listing(os.fspath(path), tag)
    asked = ConversionRequest(to=to, repair=repair, **wanted)
    return convert_listing(
        listing, os.fspath(path), os.fspath(out), asked=asked, options=options or Options(), progress=progress
    )


def verify(
    path: str,
    *,
    tag: str | None = None,
    deep: bool = False,
    against: str | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Everything that is wrong with the checkpoint in `path` (and `tag`, as for `inspect`).

    Compares every record of every file in the tag's folder with the checksum that its archive has, and the folder with
    its manifest where there is one, and searches all pickles for what acts, those of files in `path` too; `deep` also
    looks at the values of all tensors. `against` is another checkpoint that it shall be equal to, as `diff` says. Each
    byte is read once, pickles twice, and all again for `against`. Needs torch.

    Raises CheckpointNotFound and ReadFailed, as `inspect`; what a load raises for files of `against`.
    """
    from ds_reshard.operations.verification import verify_listing

    found = verify_listing(
        find_listing(os.fspath(path), tag), os.fspath(path), deep=deep, reading=reading or Reading(), progress=progress
    )
    if against is None:
        return found
    try:
        return replace(found, difference=diff(path, against, tag_a=tag, reading=reading, progress=progress))
    except ReshardError as error:
        if not found.faults:
            raise
        reason = str(error).partition("\n")[0]
        return replace(found, notes=(*found.notes, f"not compared with {against}: {reason}"))


def diff(
    a: str,
    b: str,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    names: str | None = None,
    reading: Reading | None = None,
    progress: Progress | None = None,
) -> Difference:
    """In what the checkpoints in `a` and `b` differ, each of any ZeRO stage and size: tensors and values.

    Equal means equal to the bit. Each byte of both is read once and checked, in memory of `reading.memory_nbytes`
    whatever the sizes. `names` is a map, as for `convert`: the side whose names it turns into those of the other one is
    compared as the map has it. Needs torch. Raises what a load raises for files that are missing or cannot be read, and
    ModelMismatch if both have the same names already, or if the map does not fit.
    """
    from ds_reshard.operations.comparison import compare_listings

    return compare_listings(
        find_listing(os.fspath(a), tag_a),
        find_listing(os.fspath(b), tag_b),
        names=names,
        reading=reading or Reading(),
        progress=progress,
    )


def plan(
    path: str,
    *,
    to: str,
    tag: str | None = None,
    bandwidth: float = 1e9,
    reading: Reading | None = None,
    shard: tuple[int, int] = (0, 1),
    **wanted: Unpack[TargetOptions],
) -> ConversionPlan:
    """What `convert` with the same arguments would read and write: by whom, from which files, in what time.

    Reads directories and pickles, no tensor's bytes, and imports no torch. `bandwidth` is in bytes per second.
    `shard`, (number, of how many), plans the part that `convert` writes with the same `Options.shard`, and opens no
    file of a ZeRO checkpoint beside those that the part reads: the parts together say what the whole plan says.
    Raises what `convert` raises before it writes; a part, what is wrong with its own files.
    """
    from ds_reshard.operations.units import plan_listing  # which needs numpy

    before = _bytes_asked_for()
    asked = ConversionRequest(to=to, repair=False, **wanted)
    made = plan_listing(
        find_listing(os.fspath(path), tag), asked=asked, bandwidth=bandwidth, reading=reading or Reading(), shard=shard
    )
    return replace(made, metadata_nbytes=_since(before))


def coming_run(
    path: str,
    config: str | None = None,
    *,
    flags: Sequence[str] | None = None,
    tag: str | None = None,
    steps: int | None = None,
    version: str | None = None,
) -> ComingRun:
    """The learning rates of the run that will resume the checkpoint in `path`.

    The run is given as its DeepSpeed JSON `config`, or as the `flags` of its command line for a checkpoint of
    Megatron-LM. `path` and `tag` as for `inspect`; `steps` and `version` as for `resume.lr_preview.coming_run`. Opens
    one model file and one optimizer file, and executes nothing from them.

    Raises what a load raises for files that are missing or damaged, ConfigError for a JSON or flags that cannot be
    read or that the framework would refuse, or that are of the other framework.
    """
    folder = os.fspath(path)
    if is_megatron(folder):
        if flags is None or config is not None:
            mend = "give the run's own flags: ds-reshard lr CKPT -- --lr 3e-5 --train-iters 1000 ..., and no --config"
            raise ConfigError.of(folder, "is a checkpoint of Megatron-LM", mend=mend)
        run = read_run(flags)
        if tag is not None and run.tag is not None:
            raise ConfigError.of("--tag with --ckpt-step", "both name the iteration", mend="leave out --tag")
        return megatron.coming_run(read_megatron_past(folder, tag=tag or run.tag), run, steps=steps)
    if flags is not None or config is None:
        mend = "name the DeepSpeed JSON: --config FILE; flags after -- are for checkpoints of Megatron-LM"
        raise ConfigError.of(folder, "is not a checkpoint of Megatron-LM", mend=mend)
    where = os.fspath(config)
    read = read_config(where)
    found = find_listing(folder, tag)
    if found.format is not ZERO:
        what, mend = f"ds-reshard lr does not read {found.format.name}", "give it one of DeepSpeed or Megatron-LM"
        raise UnsupportedLayout.of(found.folder, what, mend=mend)
    with one_line_for_all(found.folder):
        past = read_zero_past(found.listing)
    return lr_preview.coming_run(past, read, where=where, steps=steps, version=version)


def names(path: str, *, tag: str | None = None, names: str | None = None) -> Naming:
    """Return what a map of names, or each map that ds_reshard has, makes of a checkpoint; nothing is written.

    `path` and `tag` are those of `inspect`, `names` the path or the name of a map. If no map fits, the answer has the
    beginning of one. Raises CheckpointNotFound, and what opening damaged files raises.
    """
    return naming(find_listing(os.fspath(path), tag), names)


def read_config(path: str) -> Mapping[str, object]:
    """A DeepSpeed JSON; a key given twice is refused, as DeepSpeed does (runtime/config_utils.py, 0.19.8)."""
    mend = "name the DeepSpeed JSON: --config FILE"
    config = _json(path, mend)
    if not isinstance(config, dict):
        raise ConfigError.of(path, "is not a DeepSpeed JSON: it holds no object", mend=mend)
    return config


def read_rules(path: str) -> tuple[Rule, ...]:
    """The rules of tensor parallelism in a JSON file: a list, as `reshard.tensor_parallel` has it in the settings."""
    said = _json(path, "name a JSON file with a list of rules: --rules FILE")
    raise_faults(rule_faults(path, said), subject="--rules")
    return parse_rules(said)


def _json(path: str, mend: str) -> object:
    try:
        with open(path, encoding="utf-8") as file:
            said: object = json.load(file, object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ConfigError.of(path, f"cannot be read: {error.strerror}", mend=mend) from None
    except (ValueError, RecursionError) as error:
        mend = "correct the file; comments and other liberties of Hjson are not read here"
        raise ConfigError.of(path, f"is not JSON: {error}", mend=mend) from None
    return said


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"given twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return made


def _bytes_asked_for() -> int | None:
    """Bytes that this process has read so far, from any file, as Linux counts them (proc(5), rchar), or store."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return int(file.readline().removeprefix("rchar:")) + fetched()[1]
    except (OSError, ValueError):
        return None


def _since(before: int | None) -> int | None:
    """Bytes read since `_bytes_asked_for` said `before`."""
    after = _bytes_asked_for()
    return after - before if before is not None and after is not None else None
