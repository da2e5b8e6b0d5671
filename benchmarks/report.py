"""Raw figures, ratios, tables and the picture."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from math import log
from pathlib import Path
from statistics import linear_regression, median
from typing import TYPE_CHECKING, Any

from benchmarks.gpt import Shape

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.load import Options

ROOT = Path(__file__).resolve().parents[1]
Results = dict[str, Any]
Spread = dict[str, float]
TITLES = {
    "deepspeed": "DeepSpeed, dp 2 to 2",
    "direct": "ds_reshard, dp 4 to 2",
    "unchanged": "ds_reshard, dp 2 to 2",
    "universal": "ds_to_universal + load, dp 4 to 2",
    "converted": "ds_reshard of that universal one",
}
LOADS = ("direct", "unchanged")
COLORS = {"deepspeed": "#8c8c8c", "direct": "#1b7f5c", "unchanged": "#6fbf9f"}
MEMORY = {
    "fresh": "fresh",
    "kept": "touched before, as much as stays in use",
    "touched": "touched before, as much as any load needs",
}
WIDTH = 130


def line(run: dict[str, Any]) -> str:
    """One run in one line, for whoever watches."""
    faults = max(rank["minor_faults"] for rank in run["ranks"])
    told = max((rank["collective_nbytes"] for rank in run["ranks"]), key=sum)
    own = f"  {len(told)} collectives of {', '.join(map(str, told))} bytes" if told else ""
    return (
        f"ZeRO-{run['stage']} {run['condition']:<8} {run['contestant']:<10} {run['seconds']:8.3f} s  "
        f"cpu {run['cpu_s']:7.3f} s  {faults:>8} page faults{own}"
    )


def results(runs: list[dict[str, Any]], *, shape: Shape, options: Options, seconds: float) -> Results:
    """Everything that is written down: where it ran, raw figures of every rank of every run, and what they come to."""
    return {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "versions": versions("torch", "deepspeed", "isal"),
        "machine": machine(),
        "model": {"params": options.params, "width": shape.width, "layers": shape.layers, "dtype": "bfloat16"},
        "repeats": options.repeats,
        "summary": {str(stage): _summary([run for run in runs if run["stage"] == stage]) for stage in options.stages},
        "runs": runs,
    }


def commit() -> str:
    root = Path(__file__).parent

    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "../ds_reshard", "../benchmarks/*.py")
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


def machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": name.group(1).strip() if name else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "load_average_at_end": os.getloadavg(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "none",
    }


def versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def parser(name: str, description: str | None, *, runs: int = 5) -> argparse.ArgumentParser:
    """What every benchmark is asked: how many rounds of all contestants, and where the results go."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description, formatter_class=raw)
    made.add_argument("--runs", "--repeats", type=int, default=runs, help="rounds (default %(default)s)")
    made.add_argument("--output", type=results_folder, metavar="FOLDER", help="for the results (default: none is kept)")
    return made


def results_folder(text: str) -> Path:
    """An argument that is a folder for results: said before hours of measuring, not after them."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, and results are kept in a folder")
    return path


def keep(made: Results, part: str, output: Path | None, *, device: str | None = None) -> None:
    """Write what a part of the benchmarks has measured into a folder, where one is given: PART-DEVICE.json.

    With it the commit and the machine. `device` is what was measured, the processor unless it is named.
    """
    if output is None:
        return
    made = {"commit": commit(), "machine": machine(), **made}
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{part}-{slug(device or made['machine']['cpu'])}.json"
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)


def slug(device: str) -> str:
    """A device as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def spread(values: list[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def exponent(sizes: list[float], costs: list[float]) -> float:
    """The power of its size that a cost grows by: the slope of a line through their logarithms, by least squares."""
    return linear_regression([log(size) for size in sizes], [log(cost) for cost in costs]).slope


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Spreads of one stage: seconds, ratios of runs of one round, and the worst rank's account of bytes and memory."""
    names = list(dict.fromkeys(run["contestant"] for run in runs))
    parts = ("seconds", "ratio", "cpu_s", "cpu_ratio", "faults", "universal_over", "live", "moving", "account")
    summary: dict[str, Any] = {part: {} for part in parts}
    for condition in MEMORY:
        here = [run for run in runs if run["condition"] == condition]
        for key, ratio in (("seconds", "ratio"), ("cpu_s", "cpu_ratio")):
            taken = {n: {run["round"]: run[key] for run in here if run["contestant"] == n} for n in names}
            summary[key][condition] = {n: spread(list(values.values())) for n, values in taken.items() if values}
            summary[ratio][condition] = {
                n: spread([taken[n][i] / base for i, base in taken["deepspeed"].items()]) for n in LOADS
            }
        summary["faults"][condition] = {
            n: max(r["minor_faults"] for run in here if run["contestant"] == n for r in run["ranks"])
            for n in summary["seconds"][condition]
        }
        summary["moving"][condition] = {n: _moving(here, n) for n in LOADS}
        universal = [run for run in here if run["contestant"] == "universal"]
        if universal:
            direct, converted = ([r for r in here if r["contestant"] == name] for name in ("direct", "converted"))
            summary["universal_over"][condition] = spread(
                [u["seconds"] / d["seconds"] for u in universal for d in direct]
            )
            pairs = [(u, c) for u in universal for c in converted if u["round"] == c["round"]]
            summary["live"][condition] = spread([u["loading_s"] / c["seconds"] for u, c in pairs])
    for name in names:
        summary["account"][name] = _account([run for run in runs if run["contestant"] == name])
    return summary


def _moving(runs: list[dict[str, Any]], name: str) -> dict[str, Spread]:
    """Seconds of moving the optimizer's bytes, slowest rank, and their ratio to the bare loop's in the same run."""
    slowest = [
        {key: max(rank[key] for rank in run["ranks"]) for key in ("execute_s", "executor_s", "preadv_s")}
        for run in runs
        if run["contestant"] == name
    ]
    return {
        "execute_s": spread([run["execute_s"] for run in slowest]),
        "executor_s": spread([run["executor_s"] for run in slowest]),
        "preadv_s": spread([run["preadv_s"] for run in slowest]),
        "ratio": spread([run["executor_s"] / run["preadv_s"] for run in slowest]),
    }


def _account(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst rank of all runs; memory from the runs with fresh memory alone, where growth can be seen."""
    ranks = [rank for run in runs for rank in run["ranks"]]
    fresh = [rank for run in runs if run["condition"] == "fresh" for rank in run["ranks"]]
    return {
        "read_nbytes": max(rank["read_nbytes"] for rank in ranks),
        "owned_nbytes": max(rank["owned_nbytes"] for rank in ranks),
        "read_over_owned": max(rank["read_nbytes"] / rank["owned_nbytes"] for rank in ranks),
        "disk_read_nbytes": max(rank["disk_read_nbytes"] for rank in ranks),
        "memory_above_mib": max(rank["memory_above_nbytes"] for rank in fresh) / 2**20,
        "files_opened": max(rank["files_opened"] for rank in ranks),
        "written_nbytes": max(rank["written_nbytes"] for rank in ranks),
        "files_written": sorted({name for rank in ranks for name in rank["files_written"]}),
    }


def tables(made: Results) -> Iterator[Table]:
    for stage, summary in made["summary"].items():
        yield _times(stage, summary, made)
        yield _accounts(stage, summary)
        yield _targets(stage, summary)


def empty_table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def of(value: Spread | None, form: str = ".2f") -> str:
    if value is None:
        return ""
    if value["n"] == 1:
        return f"{value['median']:{form}}"
    return f"{value['median']:{form}} ({value['min']:{form}} to {value['max']:{form}})"


def _times(stage: str, summary: dict[str, Any], made: Results) -> Table:
    params, repeats = made["model"]["params"] / 1e6, made["repeats"]
    table = empty_table(
        f"ZeRO-{stage}, {params:.0f}M parameters: load_checkpoint, median of {repeats} (min to max)",
        "memory",
        "",
        "seconds",
        "of DeepSpeed's",
        "CPU seconds",
        "of DeepSpeed's",
        "page faults",
    )
    for condition in MEMORY:
        for name, value in summary["seconds"][condition].items():
            ratio, cpu, cpu_ratio = (summary[key][condition].get(name) for key in ("ratio", "cpu_s", "cpu_ratio"))
            faults = f"{summary['faults'][condition][name]}"
            table.add_row(condition, TITLES[name], of(value), of(ratio), of(cpu), of(cpu_ratio), faults)
        table.add_section()
    return table


def _accounts(stage: str, summary: dict[str, Any]) -> Table:
    table = empty_table(
        f"ZeRO-{stage}: the worst rank", "", "read MiB", "read / owned", "memory above MiB", "files", "written"
    )
    for name, account in summary["account"].items():
        table.add_row(
            TITLES[name],
            f"{account['read_nbytes'] / 2**20:.0f}",
            f"{account['read_over_owned']:.3f}",
            f"{account['memory_above_mib']:.1f}",
            f"{account['files_opened']}",
            f"{account['written_nbytes']}",
        )
    return table


def _targets(stage: str, summary: dict[str, Any]) -> Table:
    table = empty_table(f"ZeRO-{stage}: aims", "", "aim", "measured", "")
    for what, aim, least, form, value in _aims(summary):
        reached = value["median"] >= aim if least else value["median"] <= aim
        sign = "at least" if least else "at most"
        table.add_row(what, f"{sign} {aim:g}", of(value, form), "reached" if reached else "missed")
    return table


def _aims(summary: dict[str, Any]) -> Iterator[tuple[str, float, bool, str, Spread]]:
    for condition, aim in (("fresh", 0.7), ("kept", 0.5), ("touched", 0.5)):
        for name in LOADS:
            yield f"{name}, {condition}: of DeepSpeed's time", aim, False, ".2f", summary["ratio"][condition][name]
    for condition, value in summary["universal_over"].items():
        yield f"universal over direct, {condition}", 10, True, ".1f", value
    for condition, value in summary["live"].items():
        yield f"one universal folder, {condition}: DeepSpeed's time over ds_reshard's", 3, True, ".1f", value
    for condition in MEMORY:
        for name in LOADS:
            value = summary["moving"][condition][name]["ratio"]
            yield f"{name}, {condition}: optimizer bytes over preadv", 2, False, ".2f", value
    for name in LOADS:
        account = summary["account"][name]
        yield f"{name}: bytes read over bytes owned", 1.02, False, ".3f", spread([account["read_over_owned"]])
        yield f"{name}: memory above the engine's, MiB", 64, False, ".1f", spread([account["memory_above_mib"]])
        yield f"{name}: bytes written", 0, False, ".0f", spread([account["written_nbytes"]])


def write(made: Results, folder: Path) -> None:
    """Write the figures and the picture."""
    keep(made, "load", folder)
    _draw(made, folder / "load.png")


def _draw(made: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(made["summary"]), figsize=(6.5 * len(made["summary"]), 4.5), squeeze=False)
    for axis, (stage, summary) in zip(axes[0], made["summary"].items(), strict=True):
        for number, (name, color) in enumerate(COLORS.items()):
            spreads = [summary["seconds"][condition][name] for condition in MEMORY]
            places = [at + (number - 1) * 0.27 for at in range(len(MEMORY))]
            heights = [s["median"] for s in spreads]
            reach = [[s["median"] - s["min"] for s in spreads], [s["max"] - s["median"] for s in spreads]]
            axis.bar(places, heights, 0.25, yerr=reach, color=color, capsize=3, label=TITLES[name])
            for at, s in zip(places, spreads, strict=True):
                axis.text(at, s["max"], f"{s['median']:.2f}", ha="center", va="bottom", fontsize=8)
        universal = summary["seconds"]["fresh"].get("universal")
        note = f"\nds_to_universal + load: {universal['median']:.0f} s" if universal else ""
        axis.set_title(f"ZeRO-{stage}{note}", fontsize=10)
        axis.set_xticks(range(len(MEMORY)), [text.replace(", ", ",\n") for text in MEMORY.values()], fontsize=8)
        axis.set_xlabel("memory")
        axis.set_ylabel("load_checkpoint, seconds")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0][0].legend(fontsize=8, frameon=False)
    machine, params = made["machine"], made["model"]["params"] / 1e6
    figure.suptitle(
        f"{params:.0f}M bf16 parameters, {machine['cpu']}, {machine['cores']} cores, median of {made['repeats']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
