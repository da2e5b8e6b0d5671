"""A conversion between nanotron and DeepSpeed: what one has saved, written as the other's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.nanotron.adopted import adopt
from ds_reshard.formats.nanotron.arrangement import Wanted
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.content import METADATA
from ds_reshard.formats.nanotron.content import content_of as nanotron_content
from ds_reshard.formats.nanotron.digest import digest_of
from ds_reshard.formats.nanotron.target import nanotron_target
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.content import as_zero
from ds_reshard.formats.zero.content import content_of as zero_content
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import Content
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.target import Target
from ds_reshard.operations.name_map import NameMap, read_name_map


def from_nanotron(
    source: NanotronCheckpoint, names: str | None, target_of: Callable[[ZeroCheckpoint], Target], *, optimizer: bool
) -> Target:
    """What `target_of` makes of a checkpoint of nanotron as one of DeepSpeed; `optimizer` where states are wanted.

    Raises, with every reason, for a map of other names, and for what DeepSpeed has no place for.
    """
    content, found, faults = _renamed(nanotron_content(source), names)
    raise_faults([*faults, *(_lacking(content) if optimizer else ())], subject=f"converting {source.folder}")
    checkpoint = as_zero(content)
    target = _read_from(target_of(checkpoint), {key: held.origin for key, held in content.tensors.items()})
    target = replace(target, basis={"names": found.digest} if found is not None else {})
    if not optimizer:
        return target
    tag = f"global_step{content.steps}"
    assert checkpoint.facts is not None
    notes = tuple(_said(source, content, groups=len(checkpoint.facts.groups)))
    return replace(target, folder=tag, pointers=dict.fromkeys(target.pointers, tag), notes=notes)


def to_nanotron(source: ZeroCheckpoint, like: NanotronCheckpoint, wanted: Wanted, names: str | None) -> Target:
    """A checkpoint of DeepSpeed as one of nanotron, arranged as `like` is.

    Raises, with every reason, for a map of other names, for another model, and for what nanotron has no place for.
    """
    content, found, faults = _renamed(zero_content(source), names)
    adoption = adopt(content, like)
    raise_faults([*faults, *adoption.faults], subject=f"converting {content.folder} to nanotron")
    assert adoption.checkpoint is not None
    target = _read_from(nanotron_target(adoption.checkpoint, wanted), adoption.origins)
    basis = {"like": digest_of(like), **({"names": found.digest} if found is not None else {})}
    tag = str(content.steps)
    return replace(
        target,
        folder=tag,
        pointers=dict.fromkeys(target.pointers, tag),
        notes=(*adoption.notes, *target.notes),
        basis=basis,
    )


def _renamed(content: Content, names: str | None) -> tuple[Content, NameMap | None, list[Fault]]:
    if names is None:
        return content, None, []
    found = read_name_map(names)
    return found.applied(content), found, list(found.faults(content))


def _read_from(target: Target, origins: Mapping[TensorKey, TensorKey]) -> Target:
    """The target, its tensors read from where the source has them."""
    return replace(target, wants={key: origins[wanted] for key, wanted in target.wants.items()})


def _lacking(content: Content) -> Iterator[Fault]:
    """DeepSpeed's ZeRO trains fp32 masters; a run without them has trained its 16-bit weights."""
    if content.steps is None:
        yield UnsupportedLayout.fault(
            content.folder,
            "does not say its step",
            "metas in checkpoint_metadata.json",
            "none",
            mend="--to safetensors or torch, for the weights",
        )
    weights = content.weights
    lacking = [name for name, states in content.trained.items() if "fp32" not in states]
    if lacking:
        yield UnsupportedLayout.fault(
            lacking[0],
            f"and {len(lacking) - 1} other parameters were trained without fp32 masters",
            f"accumulate_grad_in_fp32, or {ElementType.FLOAT32.label} weights",
            weights[lacking[0]].dtype.label,
            mend="--to safetensors or torch, for the weights",
        )


def _said(source: NanotronCheckpoint, content: Content, *, groups: int) -> Iterator[str]:
    saved = len(content.facts.groups) if content.facts is not None else 0
    yield f"{saved} param groups are {groups}, each of equal hyper-parameters, as of torch's AdamW"
    if content.schedule is None:
        yield "no scheduler was saved, and none is written"
    else:
        yield f"the scheduler is the state of a LambdaLR with {groups} param groups: the coming run's must be one, too"
    if METADATA in content.extra:
        yield f"steps, samples and data stages of nanotron are in the client state, as {METADATA!r}"
    if content.batch_size is not None:
        yield f"the saving run's global batch was {content.batch_size} samples: train_batch_size {content.batch_size}"
    if any(name.startswith("random/") for name in source.listing.nbytes):
        yield "random states are left out: DeepSpeed's checkpoints have no place for them"
