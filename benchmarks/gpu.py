"""Times the executor, the scatter and the fingerprint on a CUDA device, beside the device's own bandwidths.

Everything runs in turn, `--runs` times, in one process; each ratio is of two figures of the same turn. Files lie in the
page cache. What ds_reshard loads is compared bit for bit with what torch.load loads.

Writes gpu-<device>.json to the folder of `--output`. With `--double` the CPU stands in for the device, so that this
program is known to run: what it prints then says nothing about a GPU, and is written nowhere.
Run: python -m benchmarks.gpu [--mib N] [--runs N] [--threads 4 8 16] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.report import Spread, spread
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import raise_faults
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.execution.checksums import verify
from ds_reshard.execution.cuda import CudaDevice, CudaExecutor, Device
from ds_reshard.execution.fingerprint import sum_on_device
from ds_reshard.execution.scatter import INDEX_NUMEL, Block, Portion, Scatter, Scattering, deal
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import extent_of
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.planning.copies import Copy
from ds_reshard.planning.plan import Plan
from ds_reshard.testing.late_device import LateDevice

Work = Callable[[], object]
FILE = "tensors.pt"
TENSORS = 32
ROW_NUMEL = 1024
GOALS = {"load, of pinned copy": 0.8, "fingerprint, of device copy": 0.5, "3-D strided scatter, of device copy": 0.5}
PACKAGES = ("torch", "numpy", "isal", "safetensors", "fastsafetensors")


class Place:
    """Where the contestants work: a CUDA device, or the CPU in its stead."""

    def __init__(self, *, double: bool) -> None:
        self.double = double
        self.name = "cpu" if double else "cuda"

    def executor_device(self) -> Device:
        return LateDevice() if self.double else CudaDevice(torch.cuda.current_device())

    def wait(self) -> None:
        if not self.double:
            torch.cuda.synchronize()

    def described(self) -> dict[str, Any]:
        if self.double:
            return {"name": "double on the CPU: no figures of a GPU"}
        properties = torch.cuda.get_device_properties(0)
        return {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }

    def seconds(self, work: Work) -> float:
        self.wait()
        started = time.perf_counter()
        made = work()
        self.wait()
        taken = time.perf_counter() - started
        del made
        return taken


def random_tensors(mib: int) -> dict[str, torch.Tensor]:
    """As many bytes in tensors of random bits, fp32 and bf16 by turns."""
    numel = (mib << 20) // TENSORS // 8
    made = {}
    for number in range(TENSORS):
        bits = torch.randint(-(2**63), 2**63 - 1, (numel,), dtype=torch.int64)
        made[f"layers.{number}.weight"] = bits.view((torch.float32, torch.bfloat16)[number % 2]).view(-1, 64)
    return made


def load(path: str, place: Place, *, threads: int, memory_mib: int, checksum: bool) -> dict[str, torch.Tensor]:
    """The tensors of a file of torch.save, brought to the device by the executor of ds_reshard."""
    with open_archive(path) as archive:
        records = archive.load()
    assert isinstance(records, dict)
    tensors = {
        name: torch.empty(record.shape, dtype=torch_dtype(record.dtype), device=place.name)
        for name, record in records.items()
    }
    plan = Plan(copies=tuple(_copy(name, record) for name, record in records.items()))
    host = ThreadExecutor(threads=threads, memory_nbytes=memory_mib << 20, checksum=checksum)
    executor = CudaExecutor(host, place.executor_device())
    outcome = executor.execute(plan, {name: TensorTarget(tensor) for name, tensor in tensors.items()})
    raise_faults([*outcome.faults, *(verify(outcome) if checksum else ())], subject=path)
    return tensors


def _copy(name: str, tensor: TensorRecord) -> Copy:
    return Copy(
        record=extent_of(tensor).record,
        byte_offset=tensor.byte_offset,
        numel=tensor.numel,
        dtype=tensor.dtype,
        buffer=name,
        element_offset=0,
        target_dtype=tensor.dtype,
    )


def loaders(
    folder: Path, tensors: dict[str, torch.Tensor], place: Place, options: argparse.Namespace
) -> dict[str, Any]:
    """Who loads the same tensors from a file that is in the page cache, by name."""
    saved = str(folder / FILE)
    torch.save(tensors, saved)
    made: dict[str, Work] = {"torch.load": lambda: torch.load(saved, map_location=place.name, weights_only=True)}
    for threads in options.threads:
        for checksum in (True, False):
            name = f"ds_reshard, {threads} threads" + ("" if checksum else ", no checksums")
            made[name] = _loader(saved, place, threads=threads, memory_mib=options.memory_mib, checksum=checksum)
    if util.find_spec("safetensors"):
        from safetensors.torch import load_file, save_file

        other = str(folder / "tensors.safetensors")
        save_file(tensors, other)
        made["safetensors"] = lambda: load_file(other, device=place.name)
        if util.find_spec("fastsafetensors"):
            made["fastsafetensors"] = lambda: fast_load(other, place)
    return made


def _loader(path: str, place: Place, **limits: Any) -> Work:
    return lambda: load(path, place, **limits)


def fast_load(path: str, place: Place) -> dict[str, torch.Tensor]:
    """By fastsafetensors, without GPUDirect: the files are in the page cache."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device(place.name, 0), nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    made = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    place.wait()
    made = {name: torch.empty_like(tensor).copy_(tensor) for name, tensor in made.items()} if place.double else made
    buffers.close()
    loader.close()
    return made


def reads(path: Path, threads: int, place: Place) -> Work:
    """As many threads read a file into pinned memory, 8 MiB at a time, and do nothing with it."""
    step, nbytes = 8 << 20, path.stat().st_size
    slots = [torch.empty(step, dtype=torch.uint8, pin_memory=not place.double).numpy() for _ in range(threads)]

    def read(slot: int) -> None:
        with path.open("rb", buffering=0) as file:
            for at in range(slot * step, nbytes, threads * step):
                os.preadv(file.fileno(), [slots[slot]], at)

    def work() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))

    return work


def bandwidths(mib: int, place: Place) -> dict[str, tuple[Work, int]]:
    """The device's own copies, and what ds_reshard does with bytes that are there; each with the bytes that it counts.

    A device copy of n bytes reads n and writes n; so does a scatter; a fingerprint reads n.
    """
    nbytes = mib << 20
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=not place.double)
    there = torch.empty(nbytes, dtype=torch.uint8, device=place.name)
    other = torch.empty_like(there)
    return {
        "pinned copy": (lambda: there.copy_(pinned, non_blocking=True), nbytes),
        "device copy": (lambda: other.copy_(there), nbytes),
        "fingerprint": (lambda: int(sum_on_device(0, there)), nbytes),
        "3-D strided scatter": (strided(there, place), nbytes),
        "scatter by index": (by_index(there, place), nbytes),
    }


def strided(source: torch.Tensor, place: Place) -> Work:
    """Rows of one of four tensor-parallel ranks into the whole: a box of three dimensions, bf16."""
    rows, inner = source.numel() // 2 // ROW_NUMEL, 16
    outer = rows // inner
    block = Block(
        source=0,
        target=ROW_NUMEL,
        sizes=(outer, inner, ROW_NUMEL),
        source_steps=(inner * ROW_NUMEL, ROW_NUMEL, 1),
        target_steps=(4 * inner * ROW_NUMEL + 64, 4 * ROW_NUMEL, 1),
    )
    numel = outer * (4 * inner * ROW_NUMEL + 64)
    target = torch.empty(numel, dtype=torch.bfloat16, device=place.name)
    scatter = Scatter(buffer="a", dtype=ElementType.BFLOAT16, blocks=(block,), portions=(), unit_nbytes=2)
    how = Scattering(scatters=(scatter,), table=([], [], []))
    nothing = torch.empty(3, 0, dtype=torch.int64, device=place.name)
    return lambda: deal(source, how, nothing, {"a": target})


def by_index(source: torch.Tensor, place: Place) -> Work:
    """Rows of 1 KiB, in an order without a pattern, by one index a portion; bf16."""
    units = 64
    rows, step = len(source) // 16 // units, INDEX_NUMEL // units
    table = torch.stack([torch.arange(rows), torch.randperm(rows), torch.ones(rows, dtype=torch.int64)]) * units
    portions = tuple(
        Portion(first=first, last=last, numel=(last - first) * units)
        for first, last in ((at, min(rows, at + step)) for at in range(0, rows, step))
    )
    scatter = Scatter(buffer="a", dtype=ElementType.BFLOAT16, blocks=(), portions=portions, unit_nbytes=16)
    target = torch.empty(len(source) // 2, dtype=torch.bfloat16, device=place.name)
    how, there = Scattering(scatters=(scatter,), table=([], [], [])), table.to(place.name)
    return lambda: deal(source, how, there, {"a": target})


def same_bits(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> bool:
    return expected.keys() == found.keys() and all(
        torch.equal(tensor.view(torch.uint8), found[name].cpu().view(torch.uint8)) for name, tensor in expected.items()
    )


def measured(options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Rates of all contestants in turn, in gigabytes (1e9) a second, and what they come to."""
    tensors = random_tensors(options.mib)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        loading = loaders(Path(folder), tensors, place, options)
        compared = list(loading)
        wrong = [name for name in compared if not same_bits(tensors, loading[name]())]
        if wrong:
            raise SystemExit(f"these did not load what was saved: {', '.join(wrong)}")
        loading |= {f"preadv, {n} threads": reads(Path(folder, FILE), n, place) for n in options.threads}
        contestants = bandwidths(options.mib, place) | {name: (work, nbytes) for name, work in loading.items()}
        for work, _ in contestants.values():
            place.seconds(work)
        for _ in range(options.runs):
            for name, (work, size) in contestants.items():
                rates.setdefault(name, []).append(size / place.seconds(work) / 1e9)
    return {
        "gigabytes_per_second": {name: spread(found) for name, found in rates.items()},
        "ratios": ratios(rates, options.threads),
        "goals": GOALS,
        "same_bits_as_saved": sorted(compared),
        "not_importable": [name for name in ("safetensors", "fastsafetensors") if not util.find_spec(name)],
    }


def ratios(rates: Mapping[str, list[float]], threads: list[int]) -> dict[str, Spread]:
    """Of figures of one turn; a load is the best of the numbers of threads, by its median, with checksums."""
    tried = [f"ds_reshard, {number} threads" for number in threads]
    best = max(tried, key=lambda name: spread(rates[name])["median"])
    pairs = {
        "load, of pinned copy": (best, "pinned copy"),
        "load without checksums, of pinned copy": (f"{best}, no checksums", "pinned copy"),
        "load without checksums, of preadv": (f"{best}, no checksums", best.replace("ds_reshard", "preadv")),
        "fingerprint, of device copy": ("fingerprint", "device copy"),
        "3-D strided scatter, of device copy": ("3-D strided scatter", "device copy"),
        "scatter by index, of device copy": ("scatter by index", "device copy"),
    } | {f"load, of {name}": (best, name) for name in ("torch.load", "safetensors", "fastsafetensors") if name in rates}
    return {
        name: spread([a / b for a, b in zip(rates[first], rates[second], strict=True)])
        for name, (first, second) in pairs.items()
    }


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = report.parser("gpu", __doc__)
    parser.add_argument("--mib", type=int, default=4096, help="bytes of the file and of each buffer; 16 at least")
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--memory-mib", type=int, default=256, help="pinned memory of a load")
    parser.add_argument("--folder", help="where the files are written, and removed again")
    parser.add_argument("--commit", help="for a tree that is no checkout of git")
    parser.add_argument("--double", action="store_true", help="the CPU in place of a device; no figures of a GPU")
    given = parser.parse_args()
    if given.double and given.output is not None:
        parser.error("--double has no figures that are worth keeping: leave --output away")
    if not given.double and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --double runs on the CPU, for no figures")
    place = Place(double=given.double)
    made = {
        "commit": given.commit or report.commit(),
        "double": given.double,
        "device": place.described(),
        "versions": versions(),
        "mib": given.mib,
        "memory_mib": given.memory_mib,
        **measured(given, place),
    }
    print(json.dumps(made, indent=1))
    report.keep(made, "gpu", given.output, device=made["device"]["name"])


if __name__ == "__main__":
    main()
