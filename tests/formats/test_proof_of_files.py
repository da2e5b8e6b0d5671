"""What proves the files of a conversion: manifest, sums over all units, fingerprints of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nanotron_builder import Run, write

from ds_reshard.errors import InternalError, ReshardError
from ds_reshard.model.facts import GroupFacts
from ds_reshard.operations import Options, convert, verify
from ds_reshard.operations.comparison import compare_groups
from ds_reshard.operations.workspace import Workspace

FEW = Options(threads=1, memory_nbytes=1 << 20)


def _converted(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    convert(str(write(Run(dp=2), tmp_path / "saved")), str(out), to="nanotron", dp=1, options=FEW)
    return out


def test_a_file_that_the_manifest_does_not_list_is_told(tmp_path: Path) -> None:
    out = _converted(tmp_path)
    assert verify(str(out)).faults == ()
    (next(path.parent for path in out.rglob("config.yaml")) / "notes.txt").write_text("mine")
    assert [fault.what for fault in verify(str(out)).faults] == ["is not in the manifest"]


def test_a_part_of_a_tensor_that_was_not_moved_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the notes of the units lack a part of a tensor, the output does not take its name."""
    plain = Workspace.note

    def note(self: Workspace, unit: str, known: Mapping[str, Any]) -> None:
        plain(self, unit, {**known, "tensors": known["tensors"][1:]})

    monkeypatch.setattr(Workspace, "note", note)
    with pytest.raises(InternalError, match="bytes were moved"):
        _converted(tmp_path)
    assert not (tmp_path / "out").exists()


def test_records_that_units_share_are_compared_before_the_output_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that is another than the record's, in the note of one unit, ends the conversion."""
    plain, changed = Workspace.note, []

    def note(self: Workspace, unit: str, known: Mapping[str, Any]) -> None:
        sums = [{**one, "crc32": one["crc32"] ^ 1} if not changed else one for one in known["sums"]]
        changed.extend(sums)
        plain(self, unit, {**known, "sums": sums[:1] + list(known["sums"][1:])})

    monkeypatch.setattr(Workspace, "note", note)
    source = write(Run(dp=1), tmp_path / "saved")
    with pytest.raises(ReshardError, match="crc32"):
        convert(str(source), str(tmp_path / "out"), to="nanotron", dp=2, options=FEW)
    assert changed and not (tmp_path / "out").exists()


def test_hyper_parameters_are_compared_by_the_members_of_a_group() -> None:
    """Groups in another order are those of the same parameters; a value that differs is told with both numbers."""

    def group(name: str, decay: float) -> GroupFacts:
        return GroupFacts(members=(name,), hyperparameters={"weight_decay": decay})

    assert list(compare_groups((group("a", 0.1), group("b", 0.0)), (group("b", 0.0), group("a", 0.1)))) == []
    (told,) = compare_groups((group("a", 0.1), group("b", 0.0)), (group("b", 0.0), group("a", 0.2)))
    assert (told.where, told.a, told.b) == ("param group 0 (1 in B), of a.weight_decay", "0.1", "0.2")


def test_param_groups_that_one_side_alone_has_are_told() -> None:
    """Also where their members have no states, so that no tensor tells; groups without members go by their order."""

    def group(*members: str, lr: float = 0.1) -> GroupFacts:
        return GroupFacts(members=members, hyperparameters={"lr": lr})

    def told(a: tuple[GroupFacts, ...], b: tuple[GroupFacts, ...]) -> list[tuple[str, str, str]]:
        return [(one.where, one.a, one.b) for one in compare_groups(a, b)]

    one, two = (group("a"),), (group("a"), group("b", "c"))
    assert told(one, two) == [("param group 1, of b", "absent", "2 parameters")]
    assert told(two, one) == [("param group 1, of b", "2 parameters", "absent")]
    assert told(two, (group("a"), group("d"))) == [
        ("param group 1, of b", "2 parameters", "absent"),
        ("param group 1, of d", "absent", "1 parameters"),
    ]
    tied = (group("a"), group("a"))
    assert told(tied, tied) == [] == told((group(), *one), (*one, group()))
    assert told((*one, group()), (*one, group(lr=0.2))) == [("param group 1, without parameters.lr", "0.1", "0.2")]
    assert told(one, (group(), *one)) == [("param group 0, without parameters", "absent", "0 parameters")]
