"""Writes the tables of docs/benchmarks.md and docs/scale.md anew from the committed results.

A table stands between two comments, `<!-- NAME -->` and `<!-- end -->`; a test refuses pages whose tables are others.
Run: python -m benchmarks.page
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import dcp
from benchmarks.convert import CONTESTANTS, COPY, OTHER, SAME_FILES, SYNCED, UNIVERSAL, UPSTREAM, Case
from benchmarks.report import MEMORY, ROOT, Spread, of, spread
from benchmarks.scale import points

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("docs/benchmarks.md", "docs/performance.md", "docs/scale.md")
Row = tuple[object, ...]


def results(name: str) -> Iterator[tuple[str, Any]]:
    """The committed results of one benchmark, with the names of their files: one for each machine."""
    for path in sorted(RESULTS.glob(f"{name}-*.json")):
        yield path.name, json.loads(path.read_text(encoding="utf-8"))


def ratios() -> Iterator[Row]:
    """Every comparison: ours over theirs, side by side in one run."""
    yield "what", "beside", "ratio of times", "runs"
    for what, peer, ratio in (*_loads(), *_conversions(), *_tools(), *_processor()):
        yield what, peer, of(ratio, ".2g"), f"{ratio['n']:.0f}"


_PEERS = ("deepspeed", "small pages", "universal")


def first() -> Iterator[Row]:
    """The first load of a fresh process, in each condition of the machine; the last row is the worst of each."""
    over_universal = "over `ds_to_universal` and load"
    yield (
        "machine",
        "condition",
        "seconds",
        "DeepSpeed's own",
        "over it",
        "over small pages",
        over_universal,
        "same layout, over it",
    )
    for _, made in results("first-load"):
        cpu = made["machine"]["cpu"]
        for name, one in made["conditions"].items():
            over = [of(one["over"].get(peer), ".2g") for peer in _PEERS]
            seconds = [of(one["seconds"][who], ".2g") for who in ("direct", "deepspeed")]
            yield cpu, name, *seconds, *over, of(one.get("unchanged"), ".2g")
        worst = [f"{made['worst'][peer]:.2g}" if peer in made["worst"] else "" for peer in _PEERS]
        unchanged = f"{made['worst_unchanged']:.2g}" if "worst_unchanged" in made else ""
        yield cpu, "**worst median**", "", "", *worst, unchanged


def _loads() -> Iterator[tuple[str, str, Spread]]:
    for _, made in results("load"):
        for stage, summary in made["summary"].items():
            for condition, memory in MEMORY.items():
                for name, what in (("direct", "load under another layout"), ("unchanged", "load of the same layout")):
                    ratio = summary["ratio"][condition][name]
                    yield f"{what}, ZeRO-{stage}, memory {memory}", "DeepSpeed's load, same layout", ratio
            for condition, over in summary["universal_over"].items():
                share = {**over, **{a: 1 / over[b] for a, b in (("median", "median"), ("min", "max"), ("max", "min"))}}
                peer = "`ds_to_universal` and DeepSpeed's load of what it made"
                yield f"load under another layout, ZeRO-{stage}, memory {MEMORY[condition]}", peer, share


def _conversions() -> Iterator[tuple[str, str, Spread]]:
    titles = {UNIVERSAL: "convert, universal", OTHER: "convert, another dp"}
    peers = {COPY: "`cp -r`", SYNCED: "`cp -r`, synced", UPSTREAM: "`ds_to_universal`"}
    written = {SAME_FILES: "`cp -r` of what it wrote, synced"}
    for _, made in results("convert"):
        for case in dict.fromkeys(tuple(sorted(run["case"].items())) for run in made["runs"]):
            here = [run for run in made["runs"] if run["case"] == dict(case)]
            taken = {name: [run["seconds"] for run in here if run["contestant"] == name] for name in CONTESTANTS}
            for name, title in titles.items():
                for peer, beside in {**peers, **(written if name == UNIVERSAL else {})}.items():
                    if taken[name] and taken[peer]:
                        pairs = zip(taken[name], taken[peer], strict=True)
                        yield f"{title}, {Case(**dict(case)).name}", beside, spread([a / b for a, b in pairs])


def _tools() -> Iterator[tuple[str, str, Spread]]:
    peers = {"verify": "`sha256sum`", "inspect": "`torch.load`", "convert": "`torch.distributed.checkpoint.save`"}
    for _, made in results("offline"):
        for name, ratio in made["ratios"].items():
            yield f"{name}, {made['nbytes'] / 1e9:.1f} GB", peers[name], ratio


def _processor() -> Iterator[tuple[str, str, Spread]]:
    """Processor time for a byte, beside that of a plain read: of medians, so there is no spread."""
    for name, plain in (("verify", "plain read"), ("fingerprint", "sum of int64")):
        for _, made in results(name):
            rates = made["gigabytes_per_cpu_second"]
            for what in (what for what in rates if what != plain):
                yield f"{what}, processor time", plain, spread([rates[plain]["median"] / rates[what]["median"]])


def growth() -> Iterator[Row]:
    """By which power costs grow."""
    yield "what", "by", "from, to", "power", "memory at most, MiB"
    for _, made in results("offline"):
        for name, found in made["growth"].items():
            what, _, by = name.partition(", ")
            low, high = found["points"][0], found["points"][-1]
            most = max(point["grown_nbytes"] for point in found["points"]) / 2**20
            yield what, by, f"{low['size']:.3g} to {high['size']:.3g}", f"{found['exponent']:.2f}", f"{most:.0f}"
    for _, made in results("scale"):
        for name, power in made.get("growth", {}).items():
            by, here = points(made["cases"])[name]
            most = max(case["own"]["peak_nbytes"] for case in here) / 2**20
            size = f"{here[0][by]} to {here[-1][by]}"
            yield "one rank's planning", name, size, f"{power:.2f}", f"{most:.0f}"


def spent() -> Iterator[Row]:
    """Where the time of the offline tools goes, as the kernel counts it."""
    yield "tool", "seconds", "user", "system", "read", "written", "page faults"
    for _, made in results("offline"):
        for name, counted in made["spent"].items():
            spent_s = of(made["seconds"][name], ".2g"), f"{counted['user_s']:.2g}", f"{counted['system_s']:.2g}"
            moved = _size(counted["read_nbytes"]), _size(counted["written_nbytes"])
            yield name, *spent_s, *moved, f"{counted['minor_faults']:,.0f}"


def readers() -> Iterator[Row]:
    """Loads of `torch.distributed.checkpoint`, by its own reader and by ours."""
    yield "state dict", "ranks", "reader", "seconds", "times as fast", "over `preadv`"
    for _, made in results("dcp"):
        for row in dcp.ratios(made):
            times = ("", "") if row["reader"] == dcp.TORCH else (of(row["torch"], ".2g"), of(row["floor"], ".2g"))
            yield row["case"], row["world"], row["reader"], of(row["seconds"], ".2g"), *times


def columns() -> Iterator[Row]:
    """Tensors that are cut by columns, under another tensor-parallel size."""
    yield "ranks", "entries of a rank's plan", "planning, ms", "moving, s", "over `preadv`"
    for _, made in results("rows"):
        for case in made["cases"]:
            plan = {name: value * 1e3 if name != "n" else value for name, value in case["plan_s"].items()}
            figures = (of(plan, ".2g"), of(case["seconds"], ".2g"), of(case["ratio"], ".2g"))
            yield f"{case['saved']} to {case['coming']}", case["entries"], *figures


def machines() -> Iterator[Row]:
    """Where each file of results was made, and of which commit."""
    yield "results", "machine", "commit"
    for path in sorted(RESULTS.glob("*.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        machine = made["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}"
        commit, _, changes = made["commit"].partition(" ")
        named = f"[{path.name}](../benchmarks/results/{path.name})"
        yield named, where, f"{commit[:7]} {changes}".strip()


def ranks() -> Iterator[Row]:
    """One rank of each case."""
    yield "checkpoint", "ranks", "planning, s", "memory, MiB", "files opened", "reads", "metadata", "copies", "data"
    for _, made in results("scale"):
        for case in made.get("cases", ()):
            own = case["own"]
            yield (
                f"{case['name']}, ZeRO-{case['stage']}",
                f"{case['dp']} to {case['to_dp']}",
                of(case["own_seconds"], ".2g"),
                f"{own['peak_nbytes'] / 2**20:.0f}",
                own["opens"],
                own["reads"],
                _size(own["read_nbytes"]),
                f"{case['plan']['copies']:,}",
                _size(case["plan"]["nbytes"]),
            )


def grids() -> Iterator[Row]:
    """One rank of a coming run of another grid."""
    costs = ("opening heads, s", "planning, s", "processor, s", "memory, MiB")
    yield "saved", "resumed", *costs, "files opened", "metadata", "copies", "data", "over what it owns"
    for _, made in results("grid-plan"):
        for case in made["cases"]:
            parts, plan = (case["heads"], case["own"]), case["plan"]
            yield (
                case["saved"],
                case["to"],
                of(case["seconds"]["heads"], ".2g"),
                of(case["seconds"]["own"], ".2g"),
                f"{case['cpu_s']['heads']['median'] + case['cpu_s']['own']['median']:.2f}",
                f"{case['own']['nbytes'] / 2**20:.0f}",
                f"{sum(part['opens'] for part in parts):,} + {plan['files']}",
                _size(sum(part["read_nbytes"] for part in parts)),
                f"{plan['copies']:,}",
                _size(plan["nbytes"]),
                f"{plan['nbytes'] / plan['owned_nbytes']:.3f}",
            )


def bytes_read() -> Iterator[Row]:
    """All bytes that ranks ask the system for, of small checkpoints."""
    yield "saved", "resumed", "ranks", "read, over owned"
    for _, made in results("grid-plan"):
        for case in made["read"]:
            over = case["ratios"]
            yield case["saved"], case["to"], len(over), f"{min(over):.3f} to {max(over):.3f}"


def resume() -> Iterator[Row]:
    """A resume of the largest case, on the whole: measured for one rank and multiplied; upstream's by its rules."""
    yield "", "ds_reshard", "`ds_to_universal`", "load of what it made"
    for _, made in results("scale"):
        for case in (case for case in made.get("cases", ()) if (case["name"], case["dp"]) == ("1T parameters", 4096)):
            own, look, plan, to = case["own"], case["look"], case["plan"], case["to_dp"]
            states, shards = 3 * case["tensors"], case["dp"]
            pieces, total = states * shards, 12 * case["numel"]
            yield from (
                (
                    "files opened",
                    f"{to * (own['opens'] + plan['files']) + look['opens']:,}",
                    f"{pieces * 2 + shards:,}",
                    f"{to * (states + 2):,}",
                ),
                ("files created, and removed again", "0", f"{pieces:,}", "0"),
                ("files stated or listed", f"{to * plan['files'] + look['listed']:,}", f"{pieces:,}", f"{to:,}"),
                ("read calls", f"{to * (own['reads'] + plan['reads']) + look['reads']:,}", "", ""),
                (
                    "bytes read",
                    _size(to * (own["read_nbytes"] + plan["nbytes"]) + look["read_nbytes"]),
                    _size(2 * total),
                    _size(to * total),
                ),
                ("bytes written", "0", _size(2 * total), "0"),
            )


def parts() -> Iterator[Row]:
    """The plan of all ranks."""
    yield "", ""
    for _, made in results("scale-whole"):
        yield from (
            ("parts planned, of all", f"{made['planned_parts']} of {made['parts']}"),
            ("a part, s", of(made["part_seconds"], ".1f")),
            ("processor time of a part, s", f"{made['cpu_s'] / made['planned_parts']:.1f}"),
            ("processor time of all parts, s", f"{made['cpu_s'] / made['planned_parts'] * made['parts']:.0f}"),
            (f"all parts, {made['processes']} processes, s", f"{made['all_seconds']:.0f}"),
            ("metadata read by a part", _size(made["metadata_nbytes"] / made["planned_parts"])),
            ("source files read for a target file, at most", made["files_read_by_a_unit"]),
        )


def _size(nbytes: float) -> str:
    unit = next(unit for unit in ("EB", "PB", "TB", "GB", "MB", "kB", "B") if nbytes >= _UNITS[unit] or unit == "B")
    return f"{nbytes / _UNITS[unit]:.3g} {unit}"


_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}
TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    made.__name__: made
    for made in (first, ratios, growth, spent, readers, columns, machines, ranks, resume, parts, grids, bytes_read)
}


def page(text: str) -> str:
    """A page with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        heads, *rows = TABLES[match[1]]()
        lines = (" | ".join(map(str, line)) for line in (heads, ["---"] * len(heads), *rows))
        return "\n".join([f"<!-- {match[1]} -->", "", *(f"| {line} |" for line in lines), "", "<!-- end -->"])

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    for name in PAGES:
        path = ROOT / name
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
