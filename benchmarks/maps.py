"""Times `convert` through a map that changes shapes beside the same conversion without one, page cache warm.

The checkpoint is a synthetic ZeRO-2 one of a GPT, by default 1.2 GB in 4 shards, filled with random values. The map
deals queries, keys and values out of one tensor by heads, and splits the first matrix of the perceptron; or joins them
again. Each conversion is to ZeRO-2 on three ranks, in one process; seconds are those of the processor and of the clock.
Then the plan of one rank of a run of 1e12 parameters, ZeRO-3, 512 to 384 ranks, in a fresh process: with its experts as
they were saved, a parameter each, and stacked by a map, which changes what the rank reads.
Prints JSON; `--output FOLDER` writes it there too.
Run: python -m benchmarks.maps [--layers N] [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.rank_plan import KINDS, RUN
from benchmarks.report import spread
from benchmarks.verify import fill, gpt_shapes, write_checkpoint
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.layout import Layout
from ds_reshard.operations import Options, convert
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import find_listing, open_checkpoint
from ds_reshard.planning.plan import Planner

WIDTH, HEADS = 1024, 16
PLAIN, SPLIT, PLAIN_OF_SPLIT, JOINED = "one tensor, no map", "into parts", "parts, no map", "into one tensor"
OVER = {SPLIT: PLAIN, JOINED: PLAIN_OF_SPLIT}


def shape_map(layers: int) -> dict[str, Any]:
    """Return a map between a GPT with fused matrices and one with their parts."""
    entries = []
    for kind, more in (("weight", " h"), ("bias", "")):
        parts = [f"layers.{{l}}.{name}.{kind}" for name in "qkv"]
        entries.append({"fused": f"layers.{{l}}.qkv.{kind} : (n 1+1+1 d){more}", "apart": parts})
        parts = [f"layers.{{l}}.{name}.{kind}" for name in ("gate", "up_proj")]
        entries.append({"fused": f"layers.{{l}}.up.{kind} : f+f{more}", "apart": parts})
    numbers = {"layers": layers, "n": HEADS, "d": WIDTH // HEADS, "h": WIDTH, "f": 2 * WIDTH}
    return {
        "sides": ["fused", "apart"],
        "numbers": numbers,
        "indices": {"l": "layers"},
        "same": True,
        "entries": entries,
    }


def measured(scratch: Path, layers: int, runs: int) -> dict[str, Any]:
    """Return the spreads of seconds of each contestant, and of the ratios within a round."""
    torch.set_num_threads(1)
    source, apart, names = scratch / "fused", scratch / "apart", scratch / "map.json"
    write_checkpoint(source, gpt_shapes(layers=layers, width=WIDTH), 4)
    nbytes = fill(source)
    names.write_text(json.dumps(shape_map(layers)), encoding="utf-8")
    convert(str(source), str(apart), to="zero2", dp=4, names=str(names))
    contestants = {PLAIN: (source, None), SPLIT: (source, names), PLAIN_OF_SPLIT: (apart, None), JOINED: (apart, names)}
    taken: dict[str, dict[str, list[float]]] = {name: {"cpu_s": [], "seconds": []} for name in contestants}
    for number in range(runs + 1):  # the first round is not counted
        for name, (folder, asked) in contestants.items():
            out = scratch / "out"
            cpu, started = time.process_time(), time.perf_counter()
            convert(str(folder), str(out), to="zero2", dp=3, names=asked and str(asked), options=Options(processes=1))
            if number:
                taken[name]["cpu_s"].append(time.process_time() - cpu)
                taken[name]["seconds"].append(time.perf_counter() - started)
            shutil.rmtree(out)
    over = {
        name: {
            kind: spread([a / b for a, b in zip(taken[name][kind], taken[peer][kind], strict=True)])
            for kind in ("cpu_s", "seconds")
        }
        for name, peer in OVER.items()
    }
    found = {name: {kind: spread(one) for kind, one in held.items()} for name, held in taken.items()}
    return {"nbytes": nbytes, "taken": found, "over_no_map": over}


EXPERTS = {"layers": 60, "e": 64, "f": 10240, "h": 8192}
SAVED_DP, RUN_DP, RANK = 512, 384, 209
STACKED = {
    "sides": ["apart", "stacked"],
    "numbers": EXPERTS,
    "indices": {"l": "layers", "e": "e"},
    "entries": [
        {"stacked": "layers.{l}.gate_up : e f+f h", "apart": ["layers.{l}.{e}.gate", "layers.{l}.{e}.up"]},
        {"stacked": "layers.{l}.down : e h f", "apart": ["layers.{l}.{e}.down"]},
    ],
}


def plan(folder: str, stacked: bool) -> dict[str, Any]:
    """Plan what rank `RANK` reads; the seconds of everything after the folder was listed."""
    layers, e, f, h = EXPERTS.values()
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        if stacked:
            shapes |= {f"layers.{layer}.gate_up": (e, 2 * f, h), f"layers.{layer}.down": (e, h, f)}
            continue
        for expert in range(e):
            name = f"layers.{layer}.{expert}"
            shapes |= {f"{name}.gate": (f, h), f"{name}.up": (f, h), f"{name}.down": (h, f)}
    listing = find_listing(folder, None)
    cpu, started = time.process_time(), time.perf_counter()
    with gc_disabled():
        source = open_checkpoint(listing, whole=False)
        index, origins = source.index, {}
        if stacked:
            mapped = read_name_map(STACKED).apply(source.content(), source.layout, Coming())
            assert not mapped.faults, mapped.faults[:3]
            index = index.with_layout(mapped.layout)
            origins = {key: held.origin for key, held in mapped.content.tensors.items()}
        buffer = FlatBuffer(shapes=shapes, rule=Rule.EACH, ranks=RUN_DP, kinds=KINDS)
        wanted = by_key(buffer.placements(RUN))
        sizes = {f"{kind}/0": buffer.partition_numel for kind in KINDS if kind != "fp32"}
        pairs = {key: origins.get(key, key) for key in wanted}
        made = Planner(index, Layout(wanted, {RUN: RUN_DP}), pairs).plan(RANK, sizes=sizes)
    return {
        "cpu_s": time.process_time() - cpu,
        "seconds": time.perf_counter() - started,
        "copies": len(made.copies),
        "files": len(made.files),
        "nbytes": made.nbytes,
    }


def planned(scratch: Path, runs: int) -> dict[str, Any]:
    """Return the plans of both runs by turns, and the spread of the ratio of their seconds."""
    layers, e, f, h = EXPERTS.values()
    names = [f"layers.{layer}.{expert}" for layer in range(layers) for expert in range(e)]
    shapes = {
        f"{name}.{kind}": (h, f) if kind == "down" else (f, h) for name in names for kind in ("gate", "up", "down")
    }
    folder = scratch / "experts"
    write_checkpoint(folder, shapes, SAVED_DP, stage=3)
    seen: dict[str, list[dict[str, Any]]] = {"apart": [], "stacked": []}
    for _ in range(runs):
        for name, held in seen.items():
            run = [sys.executable, "-m", "benchmarks.maps", "--plan", str(folder), name]
            held.append(json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout))
    ratios = [b["cpu_s"] / a["cpu_s"] for a, b in zip(seen["apart"], seen["stacked"], strict=True)]
    return {**seen, "stacked_over_apart": spread(ratios)}


def main() -> None:
    if sys.argv[1:2] == ["--plan"]:
        print(json.dumps(plan(sys.argv[2], stacked=sys.argv[3] == "stacked")))
        return
    parser = report.parser("maps", __doc__)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        made = measured(Path(scratch), given.layers, given.runs) | {"plan": planned(Path(scratch), given.runs)}
    made = {"torch": torch.__version__, "layers": given.layers, **made}
    print(json.dumps(made, indent=1))
    report.keep(made, "maps", given.output)


if __name__ == "__main__":
    main()
