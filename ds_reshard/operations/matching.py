"""Which tensors a run and a checkpoint have in common, and which saved tensor a weight is read from, for every host."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ds_reshard.errors import Fault, ModelMismatch
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Shape

TENSORS = ("is missing from the checkpoint", "is in the checkpoint but not in the model")
"""The problem of a tensor that only the run has, and of one that only the checkpoint has."""
TRAINED = ("is trained by this run but not by the saved one", "was trained by the saved run but not by this one")
"""The same for masters and optimizer states, which only trained parameters have."""
OTHER_SHAPE = "has another shape"
logger = logging.getLogger("ds_reshard")
_SIXTEEN = (ElementType.BFLOAT16, ElementType.FLOAT16)


def match_tensors(
    run: Mapping[str, Shape | None], saved: Mapping[str, Shape | None], *, mend: str, words: tuple[str, str] = TENSORS
) -> list[Fault]:
    """Return a fault for each tensor that one side lacks, or of which the shapes differ.

    `run` has the shapes of all ranks' tensors by name, `saved` those of the checkpoint; None is equal to every shape.
    """
    absent = [(name, words[0]) for name in run if name not in saved]
    absent += [(name, words[1]) for name in saved if name not in run]
    faults = [ModelMismatch.fault(name, what, mend=mend) for name, what in sorted(absent)]
    for name, shape in run.items():
        other = saved.get(name)
        if shape is not None and other is not None and tuple(shape) != tuple(other):
            faults.append(ModelMismatch.fault(name, OTHER_SHAPE, str(list(shape)), str(list(other)), mend=mend))
    return faults


def report_missing(
    where: str, what: str, missing: Sequence[str], unused: Sequence[str], *, mend: str, refuse: bool, warn: bool
) -> None:
    """Raise ModelMismatch about parameters that a checkpoint lacks if `refuse`; log a warning if `warn`.

    `what` says how many are there; `unused` are the names that only the checkpoint has.
    """
    shown, others = (f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" for names in (missing, unused))
    others = others or "no other names"
    if refuse:
        raise ModelMismatch.of(where, what, shown, others, mend=mend)
    if warn:
        logger.warning(
            "%s %s; these keep their values: %s (only in the checkpoint: %s); %s", where, what, shown, others, mend
        )


def choose_source(
    name: str, dtype: ElementType, saved: Mapping[str, ElementType], faults: list[Fault], *, casts: bool, mend: str
) -> str | None:
    """Return the kind of the saved tensor that a weight of type `dtype` is read from; else add a fault, and None.

    That is the weight or its master in that type; for a weight of 16 bits, else its fp32 master. If the framework
    `casts` weights itself when it loads, a 16-bit weight is also read from one of fp32, and the other way round.
    """
    kinds = [kind for kind in (WEIGHT, MASTER) if kind in saved]
    found = [kind for kind in kinds if saved[kind] is dtype]
    if dtype in _SIXTEEN:
        found += [kind for kind in kinds if saved[kind] is ElementType.FLOAT32 and (casts or kind == MASTER)]
    elif dtype is ElementType.FLOAT32 and casts and saved.get(WEIGHT) in _SIXTEEN:
        found.append(WEIGHT)
    if found:
        return found[0]
    types = ", ".join(dict.fromkeys(saved[kind].label for kind in kinds))
    faults.append(ModelMismatch.fault(name, "was not saved in the type of this run", dtype.label, types, mend=mend))
    return None
