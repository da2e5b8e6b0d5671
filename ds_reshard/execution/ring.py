"""The ring of pinned memory through which bytes go to a device, and what is said of a device that fails."""

from __future__ import annotations

from ds_reshard.errors import DeviceFailed, Fault
from ds_reshard.execution.buffers import memory_of
from ds_reshard.execution.chunks import Chunk
from ds_reshard.execution.device import Device, Event

SMALLEST_NBYTES = 4096


class Slot:
    """A place of the ring: pinned memory, scratch memory of the device, and what they were last used for."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.pinned = device.pinned(nbytes)
        self.scratch = device.scratch(nbytes)
        self.memory = memory_of(self.pinned)
        self._event: Event | None = None
        self._chunk: Chunk | None = None

    def used(self, chunk: Chunk, event: Event) -> None:
        self._chunk, self._event = chunk, event

    def wait(self) -> Fault | None:
        """Wait until the device is done with the slot; what went wrong, if it did."""
        if self._event is None or self._chunk is None:
            return None
        try:
            self._event.synchronize()
        except RuntimeError as error:
            return device_failed(self._chunk, error)
        return None


def ring(device: Device, slots: int, nbytes: int) -> list[Slot] | Fault:
    """So many slots of `nbytes`, or of the largest half, quarter, ... that there is memory for; or what is missing."""
    while True:
        try:
            return [Slot(device, nbytes) for _ in range(slots)]
        except RuntimeError as error:
            device.give_back()
            if nbytes // 2 < SMALLEST_NBYTES:
                return _no_memory(device, slots * nbytes, error)
            nbytes //= 2


def _no_memory(device: Device, nbytes: int, error: RuntimeError) -> Fault:
    return DeviceFailed.fault(
        "scratch memory of the load",
        f"the device or the host has no memory left for it: {_first_line(error)}",
        f"{nbytes} bytes of each, in small pieces",
        f"{device.free_nbytes()} bytes free on the device",
        mend='free memory of the device before the load, or load with "reshard": {"device": "cpu"}',
    )


def device_failed(chunk: Chunk, error: RuntimeError) -> Fault:
    """A device failed at a chunk, or at work before it."""
    return DeviceFailed.fault(
        chunk.runs[0].record.path,
        f"the device failed at {chunk.described()}: {_first_line(error)}",
        mend='load again in a new process, with "reshard": {"device": "cpu"} if it comes back',
    )


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
