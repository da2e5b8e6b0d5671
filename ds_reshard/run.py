"""`python -m ds_reshard.run [resume flags] script.py [arguments]`: hooks and resume policy for an unchanged script.

Also below a launcher: `torchrun ... -m ds_reshard.run ...`, `deepspeed --module ds_reshard.run ...`,
`accelerate launch -m ds_reshard.run ...`. With `-m` a module is run instead of a file. A `--local_rank` that a
launcher puts before the flags is handed on to the script.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import NoReturn

from ds_reshard.errors import ReshardError
from ds_reshard.resume import policy_sources
from ds_reshard.resume.policy import ResumePolicy

PLACE = "python -m ds_reshard.run"


def add_arguments(parser: argparse.ArgumentParser, *, place: str = policy_sources.PLACE) -> argparse.ArgumentParser:
    """Give a parser the resume flags; whatever it parses is then this process's resume policy.

    A flag that the parser knows already is left as it is, and its value read; such a parser may not be one of the
    `parents` of another. Called twice, the second call changes nothing. Once a flag was given the hooks are on, as by
    `import ds_reshard.auto`: a policy without them would be dropped; if no load has applied it at exit, rank 0 logs an
    error. `place` is how messages name the parser. Raises ConfigError for a known flag of another kind.
    """
    policy_sources.add_arguments(parser, place=place)
    policy_sources.on_asked(_put_hooks_on)
    return parser


def _put_hooks_on(policy: ResumePolicy) -> None:
    if not policy.is_default:
        from ds_reshard import auto

        auto.report_unseen()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PLACE,
        description="Run a training script unchanged, with the hooks of ds_reshard and a resume policy.",
        allow_abbrev=False,
    )
    add_arguments(parser, place=PLACE)
    parser.add_argument("--local_rank", "--local-rank", metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("script", help="the training script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, install the hooks for every framework that gets imported, and run the script in this process.

    Python processes that the script starts get hooks and policy, too. Where the script ends well and no load has
    applied the policy, the end is an error of status 1.
    """
    parser = build_parser()
    try:
        given = parser.parse_args(argv)
        from ds_reshard import auto

        if not given.module and not os.path.isfile(given.script):
            parser.exit(2, f"{PLACE}: no such script: {given.script}\n")
        insists = auto.hand_on()
    except ReshardError as error:
        parser.exit(2, f"{PLACE}: {error}\n")
    ended: SystemExit | None = None
    try:
        with _told_at_os_exit() if insists else nullcontext():
            _run(given)
    except SystemExit as end:
        ended = end
    except BaseException:
        _leave_out_own_frames()
        auto.forget_mark()
        raise
    try:
        if insists and (ended is None or ended.code in (None, 0)):
            auto.refuse_unseen()
    except ReshardError as error:
        parser.exit(1, f"{PLACE}: {error}\n")
    finally:
        auto.forget_mark()
    if ended is not None:
        raise ended


@contextmanager
def _told_at_os_exit() -> Iterator[None]:
    """Have `os._exit(0)` of this process end as `main` does; its forks, as of multiprocessing, are left alone."""
    from ds_reshard import auto

    leave, own = os._exit, os.getpid()

    def _exit(status: int) -> NoReturn:
        if os.getpid() == own:
            try:
                if status == 0:
                    auto.refuse_unseen()
            except ReshardError as error:
                os.write(2, f"{PLACE}: {error}\n".encode())
                status = 1
            auto.forget_mark()
        leave(status)

    os._exit = _exit
    try:
        yield
    finally:
        os._exit = leave


def _run(given: argparse.Namespace) -> None:
    forwarded = [] if given.local_rank is None else [f"--local_rank={given.local_rank}"]
    sys.argv = [given.script, *forwarded, *given.arguments]
    if given.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(given.script))
        runpy.run_path(given.script, run_name="__main__")


def _leave_out_own_frames() -> None:
    """Have the traceback of an error that ends this process begin with the script, as without this module."""
    show, own = sys.excepthook, {__file__, runpy.run_path.__code__.co_filename}

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = shown


if __name__ == "__main__":
    main()
