"""`convert` over random models and topologies: any way round gives the same files, and they hold what went in."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from zero_builder import TAG, Built, values, write

from ds_reshard.cli.main import main
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.execution.files import FileTarget
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.model.records import ElementType
from ds_reshard.operations import Options, convert, fingerprint

pytestmark = pytest.mark.slow

DIMS = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
TARGETS = st.tuples(st.sampled_from(("zero1", "zero2", "zero3", "bf16", "universal")), st.sampled_from((1, 2, 3, 4, 8)))


@st.composite
def models(draw: st.DrawFn) -> Built:
    """One to three param groups of one to five parameters, some frozen, some tied; one to five ranks."""
    shapes = iter(draw(st.lists(DIMS, min_size=24, max_size=24)))
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    groups = tuple(tuple((f"g{g}.p{i}", next(shapes)) for i in range(count)) for g, count in enumerate(counts))
    frozen = tuple((f"frozen.{i}", next(shapes)) for i in range(draw(st.integers(0, 2))))
    tied = (("alias", "g0.p0"),) if draw(st.booleans()) else ()
    states = draw(st.sampled_from((("exp_avg", "exp_avg_sq"), ("momentum_buffer",), ())))
    return Built(
        groups=groups,
        frozen=frozen,
        tied=tied,
        states=states,
        dp=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 1 << 30)),
    )


def _converted(source: Path, out: Path, target: tuple[str, int], sub: int | None = None) -> Path:
    size = sub if target[0] == "zero3" else None
    dp = target[1] if target[0] != "universal" else None
    convert(str(source), str(out), to=target[0], dp=dp, sub_group_size=size, options=Options(threads=1))
    return out


def _files(folder: Path) -> dict[str, bytes]:
    """All files; of a universal checkpoint not the model's, which names the size that was converted last."""
    paths = (folder / TAG).rglob("*.pt")
    universal = (folder / TAG / "zero").is_dir()
    kept = [path for path in paths if not (universal and path.name.endswith("model_states.pt"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


@pytest.fixture
def places() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(built=models(), first=TARGETS, second=TARGETS, third=TARGETS, sub=st.sampled_from((5, 40, 10**9)))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_way_round(
    places: Path, built: Built, first: tuple[str, int], second: tuple[str, int], third: tuple[str, int], sub: int
) -> None:
    """A to B to A is A, A to B to C is A to C, and every tensor is there at every stop."""
    with tempfile.TemporaryDirectory(dir=places) as folder:
        place = Path(folder)
        source = write(built, place / "source")
        a = _converted(source, place / "a", first, sub)
        b = _converted(a, place / "b", second, sub)
        assert _files(_converted(b, place / "back", first, sub)) == _files(a)
        assert _files(_converted(b, place / "c", third, sub)) == _files(_converted(a, place / "direct", third, sub))
        truth = {key: str(fingerprint_of(value)) for key, value in values(built).items()}
        for stop in (a, b):
            held = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(stop)).tensors}
            missing = {key for key in truth if key not in held and math.prod(values(built)[key].shape)}
            assert all(kind == "weight" for _, kind in missing), missing
            assert {key: held[key] for key in truth if key in held} == {k: truth[k] for k in truth if k in held}


@given(built=models())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_universal_files_hold_each_tensor_whole(places: Path, built: Built) -> None:
    with tempfile.TemporaryDirectory(dir=places) as folder:
        out = Path(folder) / "out"
        convert(str(write(built, Path(folder) / "source")), str(out), to="universal", options=Options(threads=1))
        for (name, kind), value in values(built).items():
            if kind != "weight":
                found = torch.load(out / TAG / "zero" / name / f"{kind}.pt", weights_only=True)["param"]
                assert found.shape == value.shape and torch.equal(found, value)


def test_an_interruption_ends_every_thread_at_its_next_read(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files are written side by side: none is finished first. What is left is gone on with."""
    source = write(Built(groups=((("w", (64, 4096)),),), dp=4), places / "source")
    words = ["convert", str(source), str(places / "out"), "--to", "zero2", "--dp", "4"]
    words += ["--threads", "4", "--memory", "4"]
    seen: list[int] = []
    real = FileTarget.store

    def store(self: FileTarget, at: int, data: memoryview, dtype: ElementType) -> None:
        seen.append(at)
        if len(seen) == 3:
            raise KeyboardInterrupt
        real(self, at, data, dtype)

    monkeypatch.setattr(FileTarget, "store", store)
    monkeypatch.setattr("ds_reshard.execution.threads._CHUNK_NBYTES", 4096)
    assert main(words) == 130
    assert capsys.readouterr().err == "ds-reshard: interrupted\n"
    assert len(seen) < 3 * 256 // 4 and not (places / "out").exists()  # of 256 for each kind of state
    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0
    assert main(["convert", str(source), str(places / "whole"), "--to", "zero2", "--dp", "4"]) == 0
    assert _files(places / "out") == _files(places / "whole")


def test_a_weight_that_does_not_lie_row_major_is_taken_over_as_it_lies(tmp_path: Path) -> None:
    """It keeps its param group and its states; where it would be cut, as a frozen one is, it is refused."""
    built = Built(groups=((("first", (4, 6)), ("second", (3,))),), frozen=(("third", (2, 5)),))
    held = values(built)
    held["first", "weight"] = held["first", "weight"].t().contiguous().t()
    source = write(built, tmp_path / "saved", held)
    for to, name in (("zero1", "mp_rank_00_model_states.pt"), ("zero3", "zero_pp_rank_0_mp_rank_00_model_states.pt")):
        convert(str(source), str(tmp_path / to), to=to)
        saved = torch.load(tmp_path / to / TAG / name, weights_only=False)
        assert [dict(group) for group in saved["param_shapes"]] == [{"first": (4, 6), "second": (3,)}], to
        assert to == "zero3" or torch.equal(saved["module"]["first"], held["first", "weight"])
    convert(str(source), str(tmp_path / "universal"), to="universal")
    master = torch.load(tmp_path / "universal" / TAG / "zero" / "first" / "fp32.pt", weights_only=False)
    assert torch.equal(master["param"], held["first", "fp32"])
    held["third", "weight"] = held["third", "weight"].t().contiguous().t()
    source = write(built, tmp_path / "frozen", held)
    with pytest.raises(UnsupportedLayout, match=r"third: does not lie row-major"):
        convert(str(source), str(tmp_path / "none"), to="zero3")
    with pytest.raises(UnsupportedLayout, match=r"(?s)first: does not lie row-major.*third: does not lie row-major"):
        convert(str(source), str(tmp_path / "none"), to="zero1", tp=2)


def test_the_file_of_a_rank_says_where_its_part_of_each_parameter_lies(tmp_path: Path) -> None:
    """In the rank's own partition, as DeepSpeed's fragment_address counts: 27 elements are cut after the 14th."""
    source = write(Built(groups=((("first", (4, 6)), ("second", (3,))),)), tmp_path / "saved")
    convert(str(source), str(tmp_path / "out"), to="zero1")
    with open_archive(str(tmp_path / "out" / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")) as archive:
        saved: Any = archive.load()
    (parts,) = saved["optimizer_state_dict"]["param_slice_mappings"]
    expected = {"first": {"numel": 10, "start": 0}, "second": {"numel": 3, "start": 10}}
    assert {name: part.state for name, part in parts.items()} == expected


def test_a_parameter_without_elements_keeps_its_shape_through_stage_3(tmp_path: Path) -> None:
    """Its entry in the module, where stage 3 saves a vector of no element for every parameter, does not tell it."""
    source = write(Built(groups=((("first", (4, 6)), ("empty", (0, 3)), ("second", (3,))),)), tmp_path / "saved")
    convert(str(source), str(tmp_path / "zero3"), to="zero3")
    convert(str(tmp_path / "zero3"), str(tmp_path / "out"), to="zero1")
    saved = torch.load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    assert saved["param_shapes"] == [{"first": (4, 6), "empty": (0, 3), "second": (3,)}]
    assert saved["module"]["empty"].shape == (0, 3)


@pytest.mark.parametrize("listed", [False, True])
def test_two_names_of_a_frozen_parameter_are_written_for_stage_3(tmp_path: Path, listed: bool) -> None:
    """One storage tells that they are one, where `shared_params` does not; stage 2 may list the shapes of both."""
    source = write(Built(groups=((("first", (4, 6)),),), frozen=(("third", (2, 5)),)), tmp_path / "saved")
    file = source / TAG / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)
    saved["module"]["again"] = saved["module"]["third"]
    if listed:
        saved["frozen_param_shapes"] = {"third": torch.Size((2, 5)), "again": torch.Size((2, 5))}
    torch.save(saved, file)
    convert(str(source), str(tmp_path / "zero3"), to="zero3")
    convert(str(tmp_path / "zero3"), str(tmp_path / "out"), to="safetensors")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["third"], saved["module"]["third"])
