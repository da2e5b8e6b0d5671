"""Files of torch.distributed.checkpoint that are to be written: what planning them costs, counted in calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import pytest

from ds_reshard.containers import dcp_files
from ds_reshard.containers.dcp_directory import Entry, PlacedArchive, plan_archives
from ds_reshard.containers.dcp_files import DirectoryFiles
from ds_reshard.model.content import Path, TensorSource
from ds_reshard.model.layout import Placement, TensorKey
from ds_reshard.model.records import ElementType

_SHAPES = ((7, 3), (12, 4), (1,), (0, 2))
_TENSORS = 12


@dataclass(frozen=True, kw_only=True)
class _Files(DirectoryFiles):
    """Twelve tensors of four shapes, and two values."""

    @cached_property
    def held(self) -> Mapping[TensorKey, TensorSource]:
        keys = [TensorKey(name=f"w{number}", kind="weight") for number in range(_TENSORS)]
        float32 = ElementType.FLOAT32
        return {key: TensorSource(origin=key, shape=_SHAPES[at % 4], dtype=float32) for at, key in enumerate(keys)}

    @property
    def objects(self) -> Mapping[Path, object]:
        return {("epoch",): 3, ("name",): "text"}

    @cached_property
    def told_of(self) -> list[PlacedArchive]:
        return []

    def tensor_entries(self, key: TensorKey, archives: tuple[PlacedArchive, ...]) -> Iterator[Entry]:
        self.told_of.extend(archives)
        yield Entry(path=(key.name,), archives=archives, shape=self.held[key].shape, dtype=self.held[key].dtype)

    def object_entries(self, path: Path, archive: PlacedArchive) -> Iterator[Entry]:
        self.told_of.append(archive)
        yield Entry(path=path, archives=(archive,))


@pytest.mark.parametrize("files", [2, 8, 32])
def test_parts_are_walked_once_and_archives_of_one_shape_planned_once(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many files there are: each used to walk all parts of all tensors, and to plan every archive again."""
    walked, planned = [], []
    parts, plan = Placement.parts.fget, dcp_files.plan_archive  # type: ignore[attr-defined]
    monkeypatch.setattr(Placement, "parts", property(lambda self: walked.append(self) or parts(self)))
    monkeypatch.setattr(dcp_files, "plan_archive", lambda *given: planned.append(given) or plan(*given))
    made = _Files(files=files)
    units = list(made.units())
    assert units[-1].files[0].tree()
    assert len(walked) == _TENSORS
    shapes = {(box.size, made.held[key].dtype) for rank in range(files) for key, box, _ in made.chunks(rank)}
    assert len(planned) == len(shapes) + len(made.objects)


def test_the_directory_has_archives_where_they_are_written() -> None:
    made = _Files(files=3)
    made.directory()
    told = sorted((one.file, one.byte_offset, one.nbytes) for one in made.told_of)
    expected = []
    for rank in range(3):
        plan = plan_archives(made._values(rank))
        expected += [(f"__{rank}_0.distcp", at, one.nbytes) for at, one in zip(plan.starts, plan.archives, strict=True)]
    assert told == sorted(expected)
