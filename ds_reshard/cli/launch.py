"""A tool that torchrun or srun has started on several ranks: they do one piece of work, and the first tells it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ds_reshard.errors import ConfigError, Fault, RankLost, ReshardError, as_faults, raise_faults

_TIMEOUT = timedelta(hours=4)  # a rank may read for so long while others wait
_SILENCE = timedelta(minutes=10)  # of a rank's heartbeat, which goes on while it reads; one that has ended breaks it
_JOINING_S, _LOOK_S = 600.0, 0.1
_LOST = 2  # the exit status, as of any error
_UNWINDING_S = 10.0  # that a rank has, once another is lost, to end by itself
# SLURM_NTASKS is set outside of srun too, and RANK, in Kubernetes, for torchrun itself
_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class Launched(NamedTuple):
    """The number of this process among those that a launcher has started together."""

    rank: int
    size: int

    @property
    def tells(self) -> bool:
        """Whether this is the process that prints."""
        return self.rank == 0


_ALONE = Launched(0, 1)


def launched() -> Launched:
    """Of a process that torchrun or srun has started; the only one for any other, a rank's own child too."""
    for launcher, number, size, own in _LAUNCHERS:
        if launcher in os.environ and not _inherited(own):
            return Launched(int(os.environ[number]), int(os.environ[size]))
    return _ALONE


def _inherited(name: str) -> bool:
    """Whether the process that started this one has the variable as well."""
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux, or the launcher is root's
        return False
    return any(entry.startswith(f"{name}=".encode()) for entry in entries)


def restarted() -> bool:
    """Whether torchrun has started the ranks again (--max-restarts)."""
    return launched().size > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


_SHARING: ContextVar[Launched] = ContextVar("the ranks of this tool", default=_ALONE)


def sharing() -> Launched:
    """Of a tool whose ranks have met; the only one for any other."""
    return _SHARING.get()


INTERRUPTED = 130  # as a shell says of a command that SIGINT ended


def together(run: Callable[[], int]) -> int:
    """What a tool gives whose ranks share the work; an error of any rank is every rank's. Collective.

    A rank that fails apart from others tells it where these wait for its part. Raises RankLost where one has ended.
    One that is interrupted ends here: the others hear of it by that.
    """
    mine = launched()
    if mine.size == 1:  # which needs no torch for it
        return run()
    import torch.distributed as dist

    if dist.is_initialized():  # a run that calls a tool is on its own business with its ranks
        return run()
    from ds_reshard.operations.runner import beating

    _join(mine)
    token = _SHARING.set(mine)
    try:
        with beating(_end, _SILENCE):
            try:
                return _answered(run, mine)
            except KeyboardInterrupt:  # it would wait for the others, and they for it
                _complain("interrupted")
                os._exit(INTERRUPTED)
    finally:
        _SHARING.reset(token)
        dist.destroy_process_group()  # else the end of one rank may be an error of another's


def _end(error: RankLost) -> None:
    """End this rank where it goes on without hearing that another is lost: it waits for it, or works for nothing."""
    time.sleep(_UNWINDING_S)
    _complain(str(error))
    os._exit(_LOST)


def _complain(text: str) -> None:
    from ds_reshard.cli.render import complain  # which asks here who tells

    complain(text)


def _answered(run: Callable[[], int], mine: Launched) -> int:
    from ds_reshard.operations.ranks import gather

    status, known = 0, list[Fault]()
    own: Exception | None = None
    try:
        status = run()
    except RankLost:
        raise
    except Exception as error:
        own = error
    news = [] if own is None or getattr(own, "agreed", False) else as_faults(own, where=f"rank {mine.rank}")
    while heard := [fault for _, of_rank in gather((None, news)) for fault in of_rank]:
        known += heard
        news = []
    try:
        raise_faults(known if own is None else (), subject="a tool of several ranks")
        if own is not None:
            raise own
    except ReshardError as error:
        error.agreed = True
        raise
    return status


def _join(mine: Launched) -> None:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ds_reshard.operations.ranks import collective

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        mend = (
            "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500; convert without a network: "
        )
        mend += "--shard $SLURM_PROCID/$SLURM_NTASKS"
        raise ConfigError.of("MASTER_ADDR, MASTER_PORT", "say where the ranks meet, and are not set", mend=mend)
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")
    keeps = mine.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    joining = timedelta(seconds=_JOINING_S)
    with collective():
        store = TCPStore(host, int(port), is_master=keeps, timeout=joining, wait_for_workers=False)
        place = _of_this_start(store, mine)
        dist.init_process_group("gloo", store=place, rank=mine.rank, world_size=mine.size, timeout=_TIMEOUT)


def _of_this_start(store: Any, mine: Launched) -> Any:
    """A part of a store, for the ranks that have been started together, once all are there.

    The store that torchrun's agents keep outlives its ranks: those that --max-restarts starts again would find
    addresses of ranks that are gone (torch 2.5 to 2.13). So each rank says who it is, and which ranks it sees, until
    all see the same.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    name, deadline = f"ds_reshard/{mine.size}", time.monotonic() + _JOINING_S
    store.set(f"{name}/rank/{mine.rank}", os.urandom(8).hex())
    while time.monotonic() < deadline:
        ranks = b" ".join(store.multi_get([f"{name}/rank/{one}" for one in range(mine.size)]))
        seen = hashlib.blake2b(ranks, digest_size=16).hexdigest()
        store.set(f"{name}/seen/{mine.rank}", seen)
        if set(store.multi_get([f"{name}/seen/{one}" for one in range(mine.size)])) == {seen.encode()}:
            return PrefixStore(f"{name}/{seen}", store)
        time.sleep(_LOOK_S)
    raise RuntimeError(f"not all of {mine.size} ranks have met within {_JOINING_S:.0f} s")
