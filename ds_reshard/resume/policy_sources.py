"""Where a resume policy comes from: command-line flags, and every other place that asked this process for one.

Flags serve any argparse script and the launcher. Those that a framework or a fork has already are not defined again:
their values are read where its parser puts them. What the places asked for is kept here.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass

from ds_reshard.errors import ConfigError, error_of, raise_faults
from ds_reshard.model.context_value import context_value
from ds_reshard.resume.policy import Given, ResumePolicy, combine, from_json

PLACE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its spellings, the key and value that it stands for (None: the value follows the flag), its help."""

    names: tuple[str, ...]
    key: str
    value: object
    help: str
    metavar: str | None = None

    @property
    def dest(self) -> str:
        return self.names[0].removeprefix("--").replace("-", "_")


FLAGS = (
    Flag(
        names=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
        key="scheduler",
        value="override",
        help="learning rates, schedule and weight decay of this run at the checkpoint's position; moments are kept",
    ),
    Flag(
        names=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"),
        key="scheduler",
        value="checkpoint",
        help="learning rates, schedule, weight decay and position of the checkpoint",
    ),
    Flag(
        names=("--strict-opt-param-scheduler",),
        key="scheduler",
        value="strict",
        help="refuse to load when learning rates, schedule or weight decay differ from the checkpoint's",
    ),
    Flag(
        names=("--no-load-lr-state",),
        key="scheduler",
        value="reset",
        help="this run's schedule from its beginning; moments are kept",
    ),
    Flag(
        names=("--no-load-optim",),
        key="optimizer",
        value="skip",
        help="weights only: moments and fp32 masters anew, the schedule from its beginning",
    ),
    Flag(
        names=("--load-masters-only",),
        key="optimizer",
        value="masters",
        help="weights and fp32 masters; moments and the optimizer's step anew",
    ),
    Flag(
        names=("--override-optim-hparams",),
        key="hyperparameters",
        value=None,
        metavar="NAME,NAME",
        help="hyper-parameters taken from this run: betas, eps, weight_decay, momentum, clip_grad, loss_scale, ...",
    ),
    Flag(names=("--no-load-rng",), key="rng", value=False, help="random states are not restored"),
    Flag(names=("--finetune",), key="finetune", value=True, help="weights only, iteration 0, no random states"),
    Flag(
        names=("--reset-iteration",),
        key="iteration",
        value="reset",
        help="iteration, consumed samples and the schedule's position become 0; weights and moments are kept",
    ),
    Flag(
        names=("--reset-dataloader",),
        key="dataloader",
        value="reset",
        help="the data starts anew; iteration and the schedule's position are kept",
    ),
    Flag(names=("--resume-report",), key="report", value=None, metavar="FILE", help="write the resume report here"),
)


class _OfOneParser:
    """An action of argparse that no other parser takes over, as one does that has this one's among its `parents`.

    Only the methods of its own parser tell what was parsed; argparse notes in `container` where it adds an action.
    """

    closed = False

    @property
    def container(self) -> object:
        return self._container

    @container.setter
    def container(self, parser_or_group: object) -> None:
        self._container = parser_or_group
        if self.closed:
            what = "are those of a parser that is among the parents of another: what that parses is lost"
            mend = "call add_arguments on the parser that parses, not on its parents"
            raise ConfigError.of("the resume flags", what, mend=mend)


class _Switch(_OfOneParser, argparse._StoreTrueAction):
    pass


class _Valued(_OfOneParser, argparse._StoreAction):
    pass


def add_arguments(parser: argparse.ArgumentParser, *, place: str = PLACE) -> argparse.ArgumentParser:
    """Give a parser the resume flags; whatever it parses is then this process's resume policy.

    A flag that the parser knows already is left as it is, and its value read. Called twice, the second call changes
    nothing. `place` is how messages name it. Raises ConfigError for a known flag of another kind (one that takes a
    value where ours takes none), and later where the parser is among the `parents` of another.
    """
    if getattr(parser, "_ds_reshard_flags", None) is not None:
        return parser
    dests, adopted = define(parser)
    plain, intermixed = parser.parse_known_args, parser.parse_known_intermixed_args

    def asked(parsed: argparse.Namespace) -> None:
        ask(given(parsed, dests, place=place, adopted=adopted))

    for action in parser._actions:
        if isinstance(action, _OfOneParser):
            action.closed = True

    def parse_known_args(args: object = None, namespace: object = None) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = plain(args, namespace)  # type: ignore[call-overload]
        asked(parsed)
        return parsed, rest

    def parse_known_intermixed_args(args: object = None, namespace: object = None) -> object:
        # Python 3.12.7 and later parse here without parse_known_args (argparse.py).
        found = intermixed(args, namespace)  # type: ignore[call-overload]
        asked(found[0])
        return found

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    parser.parse_known_intermixed_args = parse_known_intermixed_args  # type: ignore[method-assign, assignment]
    parser._ds_reshard_flags = dests  # type: ignore[attr-defined]
    return parser


def given(
    parsed: argparse.Namespace, dests: dict[str, Flag], *, place: str = PLACE, adopted: frozenset[str] = frozenset()
) -> Given:
    """What the flags of a parsed command line say; two flags that say different things are a ConfigError."""
    values: dict[str, object] = {}
    spelled: dict[str, str] = {}
    faults = []
    for dest, flag in dests.items():
        value = getattr(parsed, dest, None)
        if value is None or value is False:
            continue
        meant = _value(flag, value)
        if flag.key in values and values[flag.key] != meant:
            one, other = spelled[flag.key], flag.names[0]
            what = f"contradict each other: both say what becomes of the {flag.key}"
            mend = f"leave out one of {one} and {other}"
            faults.append(ConfigError.fault(f"{one} with {other}", what, mend=mend))
        values[flag.key], spelled[flag.key] = meant, flag.names[0]
    raise_faults(faults, subject=place)
    return Given(place=place, values=values, spelled=spelled, adopted=adopted & set(values))


def from_flags(flags: Sequence[str], *, place: str) -> Given:
    """What flags say that stand in one place alone, without a script's own; ConfigError for any other word."""
    parser = argparse.ArgumentParser(prog=place, add_help=False, allow_abbrev=False, exit_on_error=False)
    dests, _ = define(parser)
    try:
        parsed, rest = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ConfigError.of(place, str(error), mend="write it as docs/resume.md does, or unset it") from None
    if rest:
        raise ConfigError.of(place, f"has no such flag: {rest[0]}", mend="write the resume flags alone, or unset it")
    return given(parsed, dests, place=place)


def flags_of(policy: ResumePolicy) -> list[str]:
    """The flags that ask for a policy, as `from_flags` reads them."""
    found = []
    for flag in FLAGS:
        value = getattr(policy, flag.key)
        if flag.value is not None and value == flag.value:
            found.append(flag.names[0])
        elif flag.value is None and value:
            found.append(f"{flag.names[0]}={value if isinstance(value, str) else ','.join(value)}")
    return found


def define(parser: argparse.ArgumentParser) -> tuple[dict[str, Flag], frozenset[str]]:
    """Add the flags that the parser has not; where the value of each will be, by dest, and the script's own keys."""
    known = parser._option_string_actions
    dests: dict[str, Flag] = {}
    faults = []
    had: set[str] = set()
    taken = {action.dest for action in parser._actions}
    group = None
    for flag in FLAGS:
        theirs = next((known[name] for name in flag.names if name in known), None)
        dest = flag.dest if flag.dest not in taken else f"ds_reshard_{flag.dest}"
        if theirs is None:
            group = group or parser.add_argument_group("resume", "what a load takes from the checkpoint (ds_reshard)")
            if flag.value is None:
                group.add_argument(*flag.names, dest=dest, action=_Valued, metavar=flag.metavar, help=flag.help)
            else:
                group.add_argument(*flag.names, dest=dest, action=_Switch, default=None, help=flag.help)
        elif not _alike(theirs, flag):
            what = "this parser has a flag of that name which is of another kind"
            wanted = "a switch that is off unless given" if flag.value is not None else "a flag with a value"
            mend = "give the policy in the DeepSpeed JSON or through `python -m ds_reshard.run`"
            found = type(theirs).__name__.strip("_")
            faults.append(ConfigError.fault(flag.names[0], what, wanted, found, mend=mend))
        dests[theirs.dest if theirs is not None else dest] = flag
        if theirs is not None:
            had.add(flag.key)
    raise_faults(faults, subject="command line")
    return dests, frozenset(had)


def _alike(theirs: argparse.Action, flag: Flag) -> bool:
    """Whether the value of a flag that the parser has tells if it was given, and what."""
    if flag.value is None:
        return theirs.nargs in (None, "*", "+") and theirs.default is None
    return theirs.nargs == 0 and theirs.const is True and theirs.default in (None, False)


def _value(flag: Flag, value: object) -> object:
    if flag.value is not None:
        return flag.value
    if flag.key != "hyperparameters":
        return str(value)
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split(",")
    clean = tuple(dict.fromkeys(str(name).strip() for name in names if str(name).strip()))
    if not clean or not all(name.isidentifier() for name in clean):
        what, mend = "takes names separated by commas", f"write {flag.names[0]} betas,eps"
        fault = ConfigError.fault(flag.names[0], what, "names such as betas,eps", repr(value), mend=mend)
        raise error_of([fault], subject=PLACE)
    return clean


_LOCK = threading.Lock()
_PLACES: dict[str, Given] = {}
_LISTENERS: list[Callable[[ResumePolicy], None]] = []


def ask(given: Given) -> None:
    """Note what a place gave, instead of what it gave before; ConfigError where places differ.

    A place that gives nothing takes nothing back: scripts parse again for defaults, or with a second parser.
    """
    if not given.values:
        return
    with _LOCK:
        others = [one for place, one in _PLACES.items() if place != given.place]
        policy = combine([*others, given])
        _PLACES[given.place] = given
    for listener in list(_LISTENERS):
        listener(policy)


def on_asked(listener: Callable[[ResumePolicy], None]) -> None:
    """Call `listener` with the policy whenever one is asked for, and now if one was; each listener once."""
    if listener not in _LISTENERS:
        _LISTENERS.append(listener)
    policy = asked_policy()
    if not policy.is_default:
        listener(policy)


_APPLIED: list[ResumePolicy] = []
_WITNESSES: list[Callable[[], None]] = []


def note_applied(policy: ResumePolicy) -> None:
    """Note on every rank that a load has applied a policy; nothing where it is the default one."""
    if not policy.is_default:
        _APPLIED.append(policy)
        for witness in _WITNESSES:
            witness()


def on_applied(witness: Callable[[], None]) -> None:
    """Call `witness` whenever a load has applied a policy."""
    _WITNESSES.append(witness)


def applied() -> bool:
    """Whether a load of this process has applied a policy."""
    return bool(_APPLIED)


_NO_RESUME: ContextVar[bool] = ContextVar("ds_reshard_no_resume", default=False)


def no_resume() -> AbstractContextManager[None]:
    """What is loaded meanwhile is no resume, whoever has saved it: no policy applies to it."""
    return context_value(_NO_RESUME, True)


def asked_policy(*more: Given) -> ResumePolicy:
    """The policy of every place together with `more` (a host's own configuration); see `no_resume`."""
    if _NO_RESUME.get():
        return ResumePolicy()
    with _LOCK:
        return combine([*_PLACES.values(), *more])


def policy_beside(config: Mapping[str, object]) -> ResumePolicy:
    """The policy of every place together with a DeepSpeed JSON."""
    section = config.get("ds_reshard")
    return asked_policy(from_json(section.get("resume", {}) if isinstance(section, Mapping) else {}))


def refuse_unapplied(host: str, *, unless: Callable[[], bool] = lambda: False) -> None:
    """Raise ConfigError where a policy, or a report of it, was asked for, and `host` loads without DeepSpeed.

    `unless` says that it is applied elsewhere, and is called where one was asked for alone.
    """
    policy = asked_policy()
    if (not policy.is_default or policy.report is not None) and not unless():
        raise ConfigError.of(
            ", ".join(policy.asked.values()),
            f"says what a load takes from the checkpoint, and {host} loads without DeepSpeed: it cannot be applied",
            mend="leave it out, or train with DeepSpeed",
        )


def adopted(key: str) -> bool:
    """Whether `key` was given through a flag of the script's own, which the script acts on as well."""
    with _LOCK:
        return any(key in given.adopted for given in _PLACES.values())


def forget() -> None:
    """Forget what was asked."""
    with _LOCK:
        _PLACES.clear()
        _APPLIED.clear()
