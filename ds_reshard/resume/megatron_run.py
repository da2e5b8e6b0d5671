"""The coming run's schedule from Megatron-LM's own flags, as its training makes it of them.

`get_optimizer_param_scheduler` (megatron/training/training.py) and the checks of `validate_args` (arguments.py),
the same in 0.18.2 and 0.19.2.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ds_reshard.errors import ConfigError, Fault, raise_faults
from ds_reshard.resume.flags import define, given
from ds_reshard.resume.megatron_past import Bounds
from ds_reshard.resume.megatron_schedule import Schedule
from ds_reshard.resume.policy import ResumePolicy, combine

SUBJECT = "the flags after --"
_FLOATS = {
    "lr": None,
    "min_lr": 0.0,
    "lr_warmup_fraction": None,
    "lr_warmup_init": 0.0,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "start_weight_decay": None,
    "end_weight_decay": None,
}
_WHOLE = {
    "train_iters": None,
    "train_samples": None,
    "global_batch_size": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "ckpt_step": None,
}
_WORDS = {
    "lr_decay_style": ("linear", ("constant", "linear", "cosine", "inverse-square-root", "WSD")),
    "lr_wsd_decay_style": ("exponential", ("exponential", "linear", "cosine", "minus_sqrt")),
    "weight_decay_incr_style": ("constant", ("constant", "linear", "cosine")),
}
_ELSEWHERE = {
    "yaml_cfg": "its values are in a YAML file",
    "step_batch_size_schedule": "the batch size, in which the schedule counts, follows the samples",
    "use_mup": "the rates of hidden matrices follow from the model's width",
}
"""Flags under which the schedule is not in the flags alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRun:
    """`bounds` are those of groups that follow the schedule, `decoupled` those of embeddings with a rate of their own.

    `batch` is the number of samples of an iteration, `grows` whether it begins with less; `unread` counts the flags
    that have nothing to do with the schedule.
    """

    schedule: Schedule
    bounds: Bounds
    decoupled: Bounds | None
    batch: int
    grows: bool
    policy: ResumePolicy
    tag: str | None
    unread: int


def read_run(words: Sequence[str]) -> MegatronRun:
    """A command line of `megatron.training`, or only what shapes the schedule; ConfigError names what is wrong."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    _add(parser)
    dests, _ = define(parser)
    parsed, rest = parser.parse_known_args(list(words))
    raise_faults([*_misspelled(parser, rest), *_faults(parsed)], subject=SUBJECT)
    decoupled = None
    if parsed.decoupled_lr is not None:
        low = parsed.decoupled_min_lr if parsed.decoupled_min_lr is not None else parsed.min_lr
        decoupled = (parsed.decoupled_lr, low)
    return MegatronRun(
        schedule=_schedule(parsed),
        bounds=(parsed.lr, parsed.min_lr),
        decoupled=decoupled,
        batch=parsed.global_batch_size,
        grows=parsed.rampup_batch_size is not None,
        policy=combine([given(parsed, dests, place=SUBJECT)]),
        tag=str(parsed.ckpt_step) if parsed.ckpt_step else None,
        unread=sum(word.startswith("--") for word in rest),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fault = ConfigError.fault(SUBJECT, message, mend="write them as for Megatron-LM")
        raise ConfigError(f"{fault.line()}; {fault.mend}", [fault])


def _add(parser: argparse.ArgumentParser) -> None:
    for names, kind in ((_FLOATS, float), (_WHOLE, int)):
        for name, default in names.items():
            parser.add_argument(_flag(name), type=kind, default=default)
    for name, (usual, choices) in _WORDS.items():
        parser.add_argument(_flag(name), default=usual, choices=choices)
    parser.add_argument("--rampup-batch-size", nargs="*")
    for name in _ELSEWHERE:
        if name == "use_mup":
            parser.add_argument(_flag(name), action="store_true", default=None)
        else:
            parser.add_argument(_flag(name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _schedule(parsed: argparse.Namespace) -> Schedule:
    batch = parsed.global_batch_size
    if parsed.train_iters:
        length = parsed.train_iters * batch
        decay = (parsed.lr_decay_iters if parsed.lr_decay_iters is not None else parsed.train_iters) * batch
        warmup = parsed.lr_warmup_iters * batch
        wsd = parsed.lr_wsd_decay_iters * batch if parsed.lr_wsd_decay_iters is not None else None
    else:
        length = parsed.train_samples
        decay = parsed.lr_decay_samples if parsed.lr_decay_samples is not None else parsed.train_samples
        warmup, wsd = parsed.lr_warmup_samples, parsed.lr_wsd_decay_samples
    if parsed.lr_warmup_fraction is not None:
        warmup = parsed.lr_warmup_fraction * decay
    constant = parsed.weight_decay_incr_style == "constant"
    values = {
        "max_lr": parsed.lr,
        "min_lr": parsed.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": parsed.lr_decay_style,
        "start_wd": parsed.weight_decay if constant else parsed.start_weight_decay,
        "end_wd": parsed.weight_decay if constant else parsed.end_weight_decay,
        "wd_incr_steps": length,
        "wd_incr_style": parsed.weight_decay_incr_style,
        "init_lr": parsed.lr_warmup_init,
        "wsd_decay_steps": wsd,
        "lr_wsd_decay_style": parsed.lr_wsd_decay_style,
    }
    return Schedule(values=values, position=0)


def _faults(parsed: argparse.Namespace) -> list[Fault]:
    """What Megatron refuses, and what the flags do not tell."""
    faults = [
        _fault(_flag(name), f"is given, and {why}: its curve is not drawn", "start the run with --resume-report FILE")
        for name, why in _ELSEWHERE.items()
        if getattr(parsed, name) is not None
    ]
    if parsed.lr is None:
        faults.append(_fault("--lr", "is missing", "add --lr RATE"))
    elif not 0 <= parsed.min_lr <= parsed.lr or parsed.lr_warmup_init > parsed.lr:
        faults.append(_fault("--min-lr, --lr-warmup-init", "are above --lr or below 0", "give them as for Megatron-LM"))
    if bool(parsed.train_iters) == bool(parsed.train_samples):
        faults.append(_fault("--train-iters, --train-samples", "just one of them is needed", "add --train-iters N"))
    if not parsed.global_batch_size or parsed.global_batch_size < 1:
        mend = "add --global-batch-size N: the schedule counts samples"
        faults.append(_fault("--global-batch-size", "is missing or below 1", mend))
    others = "samples" if parsed.train_iters else "iters"
    wrong = [name for name in (f"lr_decay_{others}", f"lr_warmup_{others}") if getattr(parsed, name)]
    if parsed.lr_warmup_fraction is not None:
        wrong += [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(parsed, name)]
    for name in dict.fromkeys(wrong):
        mend = f"leave out {_flag(name)}"
        faults.append(_fault(_flag(name), "does not go with --train-* or --lr-warmup-fraction as they are", mend))
    if (parsed.weight_decay_incr_style == "constant") != (parsed.start_weight_decay is None) or (
        (parsed.start_weight_decay is None) != (parsed.end_weight_decay is None)
    ):
        where = "--start-weight-decay, --end-weight-decay"
        faults.append(_fault(where, "go with --weight-decay-incr-style linear or cosine", "give all three or none"))
    return faults


def _misspelled(parser: argparse.ArgumentParser, rest: Sequence[str]) -> list[Fault]:
    """Flags that are almost one that shapes the schedule: Megatron takes no abbreviations either."""
    known = list(parser._option_string_actions)
    faults = []
    for word in rest:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9) if name.startswith("--") else []
        near = near or [one for one in known if name.startswith("--lr") and one.startswith(name)][:1]
        if near:
            faults.append(_fault(name, "is no flag of Megatron-LM's", f"write {near[0]}"))
    return faults


def _fault(where: str, what: str, mend: str) -> Fault:
    return ConfigError.fault(where, what, mend=mend)
