"""On a rank of Megatron's process: what preflight says of a load, and what the load then does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import format_jobs
import torch
from cuda_stand_in import _ANSWERS
from format_jobs import RUN, _setup


def foresee(arguments: str, folder: str, world: int, without: str = "") -> dict[str, Any]:
    import small_gpt

    from ds_reshard.hosts.megatron.preflight import forecast

    words = [*small_gpt.MODEL.split(), *RUN.replace(without, "").split(), *arguments.split()]
    with _no_gpu():
        return forecast(folder, words, world=world).to_json()


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """As on a login node: nothing of a GPU answers."""
    with contextlib.ExitStack() as patched:
        for name in _ANSWERS:
            answer = (
                mock.Mock(return_value=False) if name == "is_available" else mock.Mock(side_effect=RuntimeError(name))
            )
            patched.enter_context(mock.patch.object(torch.cuda, name, answer))
        yield


def command(words: list[str]) -> dict[str, Any]:
    """`ds-reshard` with these words: its status, and what it says."""
    import contextlib
    import io

    from ds_reshard.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def outcome(arguments: str, folder: str, events: str | None = None, without: str = "") -> dict[str, Any]:
    """How the load ends: who loaded, and the report; or the class of the error, Megatron's own ones too."""
    import ds_reshard
    from ds_reshard.operations import watching

    watching.ask(None, events)
    format_jobs.RUN = RUN.replace(without, "")
    ds_reshard.install("megatron")
    try:
        _setup(f"{arguments} --load {folder}")
    except BaseException as error:  # CheckpointException of torch is no Exception
        return {"refused": type(error).__name__, "text": str(error)[:600]}
    report = ds_reshard.last_report()
    if report is None:
        return {"refused": "nothing", "text": "begun from the start"}
    rows = {row.name: row for row in report.rows}
    return {"refused": "", "loader": rows["tensors read by"].used, "report": report.to_json()}
