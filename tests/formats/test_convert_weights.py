"""`convert --to safetensors` and `--to torch`: whole tensors, read back with the libraries that people use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zero_builder import Built, values, write

from ds_reshard.containers import safetensors as containers
from ds_reshard.errors import ReshardError
from ds_reshard.operations import Options, convert, verify

pytestmark = pytest.mark.slow

BUILT = Built(
    groups=((("embed.weight", (13, 7)), ("first.weight", (5, 7))), (("bias", (5,)), ("scale", ()))),
    frozen=(("tower", (3, 2)),),
    tied=(("head.weight", "embed.weight"),),
    dp=3,
)


@pytest.fixture(params=["zero2", "zero3", "universal"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The same state under three layouts; ZeRO 3 holds no 16-bit weights."""
    made = write(BUILT, tmp_path / "made")
    if request.param == "zero2":
        return made
    out = tmp_path / "source"
    convert(str(made), str(out), to=request.param)
    return out


def _weights(dtype: str | None) -> dict[str, torch.Tensor]:
    held, found = values(BUILT), {}
    for (name, kind), value in held.items():
        if kind == "weight":
            kept = held.get((name, "fp32"), value) if dtype is not None else value
            found[name] = kept.to(getattr(torch, dtype)) if dtype is not None else kept
    return found


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_safetensors(source: Path, tmp_path: Path, dtype: str | None) -> None:
    """One file, which the library reads; tied weights are there once."""
    out = tmp_path / "out"
    assert convert(str(source), str(out), to="safetensors", dtype=dtype).complete
    assert sorted(path.name for path in out.iterdir()) == ["ds_reshard.json", "model.safetensors"]
    _same(load_file(out / "model.safetensors"), _weights(dtype))


def test_several_safetensors_have_an_index(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files of a bounded size, each tensor in the one that the index names; in parts by two processes."""
    monkeypatch.setattr(containers, "_FILE_NBYTES", 100)
    out = tmp_path / "out"
    assert not convert(str(source), str(out), to="safetensors", options=Options(shard=(1, 2))).complete
    assert convert(str(source), str(out), to="safetensors", options=Options(shard=(0, 2))).complete
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held = {name: load_file(out / name) for name in files}
    expected = _weights(None)
    _same({name: held[file][name] for name, file in index["weight_map"].items()}, expected)
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in expected.values())


@pytest.mark.parametrize("to", ["safetensors", "pytorch"])
def test_the_index_of_several_files_is_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """The output is clean, and an index that was changed since is found by its checksum."""
    monkeypatch.setattr(containers, "_FILE_NBYTES", 100)
    convert(str(write(BUILT, tmp_path / "made")), str(tmp_path / "out"), to=to)
    assert verify(str(tmp_path / "out")).clean
    index = tmp_path / "out" / "model.safetensors.index.json"
    size = json.loads(index.read_text())["metadata"]["total_size"]
    index.write_text(index.read_text().replace(str(size), str(size - 1)))
    faults = verify(str(tmp_path / "out")).faults
    assert [(fault.where, fault.what) for fault in faults] == [(str(index), "is not as the manifest lists it")]


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_torch_files(source: Path, tmp_path: Path, dtype: str | None) -> None:
    """A state dict of each kind, the weights' with its tied names."""
    out = tmp_path / "out"
    assert convert(str(source), str(out), to="torch", dtype=dtype).complete
    found: dict[str, Any] = {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}
    assert set(found) == {"weight", "fp32", "exp_avg", "exp_avg_sq"}
    weights = found.pop("weight")
    assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    weights.pop("head.weight")
    _same(weights, _weights(dtype))
    for kind, tensors in found.items():
        _same(tensors, {name: value for (name, of), value in values(BUILT).items() if of == kind})


def test_what_does_not_go_together(tmp_path: Path) -> None:
    source = str(write(BUILT, tmp_path / "made"))
    for given, word in (
        ({"to": "zero1", "dtype": "float32"}, "--dtype: zero1 has no such option"),
        ({"to": "torch", "dtype": "int8"}, "--dtype int8"),
        ({"to": "safetensors", "dp": 2}, "--dp"),
    ):
        with pytest.raises(ReshardError, match=word):
            convert(source, str(tmp_path / "out"), **given)  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
