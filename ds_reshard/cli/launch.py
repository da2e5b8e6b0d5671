"""A tool that torchrun or srun has started on several ranks: they do one piece of work, and the first tells it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from ds_reshard.errors import ConfigError, Fault, RankLost, ReshardError, as_faults, raise_faults

_TIMEOUT = timedelta(hours=4)  # a rank may read for so long while others wait; one that has ended is told at once
_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is set outside of srun too
)


class Launched(NamedTuple):
    """The number of this process among those that a launcher has started together."""

    rank: int
    size: int

    @property
    def tells(self) -> bool:
        """Whether this is the process that prints."""
        return self.rank == 0


def launched() -> Launched:
    """Of a process that torchrun or srun has started; the only one for any other."""
    for launcher, number, size in _LAUNCHERS:
        if launcher in os.environ:
            return Launched(int(os.environ[number]), int(os.environ[size]))
    return Launched(0, 1)


def together(run: Callable[[], int]) -> int:
    """What a tool gives whose ranks share the work; an error of any rank is every rank's. Collective.

    A rank that fails apart from others tells it where these wait for its part. Raises RankLost where one has ended.
    """
    import torch.distributed as dist

    mine = launched()
    if mine.size == 1:
        return run()
    _join(mine)
    try:
        return _answered(run, mine)
    finally:
        dist.destroy_process_group()  # else the end of one rank may be an error of another's


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

    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        mend = "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500"
        fault = ConfigError.fault("MASTER_ADDR, MASTER_PORT", "say where the ranks meet, and are not set", mend=mend)
        raise ConfigError(f"{fault.line()}; {mend}", [fault])
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")
    method = f"tcp://{host}:{port}" if "TORCHELASTIC_RUN_ID" not in os.environ else "env://"
    dist.init_process_group("gloo", init_method=method, rank=mine.rank, world_size=mine.size, timeout=_TIMEOUT)
