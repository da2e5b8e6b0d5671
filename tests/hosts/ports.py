"""A port for ranks that meet: found by one process, and listened to by another a while later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LEAST = 20_000


def free_port() -> int:
    """One below those that the system gives to connections: else one of a test beside may have it by then."""
    most = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(_LEAST, most), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no port is free of 100 between {_LEAST} and {most}")
