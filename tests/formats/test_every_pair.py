"""Each format that can be read into each that can be written, on one run: every tensor to the bit, steps and groups.

The run is a synthetic one of nanotron; what other formats hold of it is made by `convert`, and is what real frameworks
load (tests/hosts). Every source is converted to every target, and each target is read back as values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every_pair import BF16, COUNTED, READ, REFUSED, WRITTEN, table
from nanotron_builder import Run, again, values, write
from test_nanotron_convert import contents, same

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.operations import Options, convert, diff, fingerprint, inspect, plan, verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("golden_layouts")]

RUNS = {"bf16 with masters": Run(dp=2, tp=2), "fp32": Run(dp=2, pp=2, masters=False)}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


@pytest.fixture(scope="module")
def sources(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run in each format."""
    place = tmp_path_factory.mktemp("sources")
    saved = {"nanotron": write(run, place / "nanotron")}
    for kind in READ:
        if kind != "nanotron" and not (kind == "bf16" and not run.masters):
            saved[kind] = converted(saved["nanotron"], place / kind, kind, {})
    return saved


@pytest.fixture(scope="module")
def expected(sources: dict[str, Path]) -> dict[tuple[str, str], str]:
    """The fingerprint of each tensor of the run."""
    return {(one.name, one.kind): one.fingerprint for one in fingerprint(str(sources["nanotron"])).tensors}


def converted(source: Path, out: Path, to: str, more: dict[str, Any]) -> Path:
    sizes = {"zero1": 3, "zero2": 2, "zero3": 2, "bf16": 2, "dcp": 3, "accelerate": 2}
    dp = {"dp": sizes[to]} if to in sizes else {}
    convert(str(source), str(out), to=to, options=Options(threads=1, memory_nbytes=1 << 20), **dp, **more)
    return out


MAP: dict[str, Any] = {
    "sides": ["nanotron", "other"],
    "numbers": {"g": 2, "q": 2, "d": 2, "h": 6, "a": 2, "b": 3, "c": 8},
    "indices": {"l": 2},
    "same": True,
    "entries": [
        {"nanotron": "blocks.{l}.pp_block.qkv.weight : (g q+1+1 d) h", "other": ["{l}.q", "{l}.k", "{l}.v"]},
        {"nanotron": "blocks.0.pp_block.out.weight : (a b) c", "other": "out : c (b a)"},
        {"nanotron": ["blocks.0.pp_block.ln.weight", "norm.pp_block.weight"], "other": "norms : 6+7"},
    ],
}
"""A tensor that is split, one that is transposed, and tensors that are joined, in either direction."""


@pytest.fixture(scope="module")
def mapped(run: Run, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run in each format but nanotron's, under the names and shapes of the map's other side."""
    place = tmp_path_factory.mktemp("mapped")
    (place / "map.json").write_text(json.dumps(MAP), encoding="utf-8")
    names = {"names": str(place / "map.json")}
    return {"map": place / "map.json", "nanotron": sources["nanotron"]} | {
        kind: converted(sources["nanotron"], place / kind, kind, names) for kind in sources if kind != "nanotron"
    }


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("kind", READ)
def test_every_tensor_of_every_pair(
    kind: str, to: str, run: Run, sources: dict[str, Path], expected: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    """Masters and moments are equal; weights too, or they are the masters, or what is cast from these."""
    check_pair(kind, to, run, sources, expected, tmp_path)


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("kind", [kind for kind in READ if kind != "nanotron"])
def test_every_tensor_through_a_map(
    kind: str, to: str, run: Run, mapped: dict[str, Path], expected: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    """There from nanotron's, and back into each format."""
    check_pair(kind, to, run, mapped, expected, tmp_path, names=str(mapped["map"]))


def check_pair(
    kind: str,
    to: str,
    run: Run,
    sources: dict[str, Path],
    expected: dict[tuple[str, str], str],
    tmp_path: Path,
    **names: str,
) -> None:
    whole = kind in ("dcp", "accelerate", "pytorch")  # whose weights are the masters
    if (kind == "bf16" and not run.masters) or REFUSED.get((kind, to)) == BF16 or (to == "bf16" and not run.masters):
        if kind != "bf16":
            with pytest.raises(UnsupportedLayout, match="was not trained in bf16"):
                converted(sources[kind], tmp_path / "out", to, names)
        return
    like: dict[str, Any] = {**names}
    if to == "nanotron" and kind != "nanotron":
        like["like"] = str(write(again(run, seed=5), tmp_path / "like"))
    if REFUSED.get((kind, to)) == COUNTED:
        with pytest.raises(UnsupportedLayout, match="says no number of steps and samples"):
            converted(sources[kind], tmp_path / "out", to, like)
        return
    out = converted(sources[kind], tmp_path / "out", to, like)
    if to == "nanotron":
        same(contents(out), contents(sources["nanotron"]))
    held = values(run)
    if to == "safetensors":
        return
    found = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(out)).tensors} if to != "torch" else {}
    masters = "fp32" if run.masters else "weight"
    for (name, state), value in held.items():
        if to == "torch":
            saved = torch.load(out / f"{state}.pt", weights_only=True)[name]
            kept = value if not whole or state != "weight" else held[name, masters]
            assert torch.equal(saved, kept), (name, state)
    if found:
        states = {key for key in expected if key[1].startswith("exp_avg")}
        assert states and {key: found[key] for key in states} == {key: expected[key] for key in states}
        for name, _ in states:
            fp32 = expected[name, masters]
            assert fp32 in (found.get((name, "fp32")), found.get((name, "weight"))), name


@pytest.mark.parametrize("kind", READ)
def test_every_tool_on_every_source(kind: str, run: Run, sources: dict[str, Path], tmp_path: Path) -> None:
    if kind not in sources:
        return
    path = str(sources[kind])
    assert inspect(path).faults == ()
    assert verify(path, deep=True).faults == ()
    assert diff(path, path).equal
    made = plan(path, to="safetensors")
    assert made.bytes_written > 0


def test_the_table_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    rows = "\n".join(table()).rstrip()
    assert rows in page, f"put this table into docs/formats.md:\n{rows}"
