"""What an executor needs of a device: memory, and streams of work that run beside the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """The work that a stream had been given at some moment."""

    def synchronize(self) -> None:
        """Wait for that work. Raises RuntimeError where some of it failed."""


class Stream(Protocol):
    """Work that a device does in order, after the host went on."""

    def run(self, work: Callable[[], None]) -> None:
        """Give the stream the tensor operations that `work` makes. Raises RuntimeError where they cannot be given."""

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Work that is given from now on begins after the event's; the host does not wait."""


class Device(Protocol):
    """Memory and streams; RuntimeError where memory cannot be had."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the device's memory."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that is copied to the device beside other work; one byte an element."""

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Memory of the device; one byte an element."""

    def stream(self) -> Stream: ...

    def given(self) -> Event:
        """All work that the caller has given the device so far."""

    def give_back(self) -> None:
        """Give memory that nothing uses back to the device."""

    def free_nbytes(self) -> int:
        """Memory of the device that is free."""


class CudaStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


class CudaDevice:
    """A CUDA device, by number."""

    def __init__(self, number: int) -> None:
        self._device = torch.device("cuda", number)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def given(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def free_nbytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])
