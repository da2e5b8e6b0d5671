"""Folders of EasyR1 and verl as the door knows them."""

from __future__ import annotations

from collections.abc import Sequence

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.fsdp.checkpoint import FsdpCheckpoint, is_fsdp, list_fsdp, open_fsdp
from ds_reshard.formats.fsdp.target import fsdp_target
from ds_reshard.model.checkpoint import Checkpoint, SavedCheckpoint, folder_format
from ds_reshard.model.content import Content
from ds_reshard.model.target import Asked, Target

TO = "fsdp"


class OpenedFsdp(SavedCheckpoint):
    def target(self, asked: Asked, like: Checkpoint | None) -> Target | None:
        assert isinstance(self.state, FsdpCheckpoint)
        return fsdp_target(self.state, self.dp if asked.dp is None else asked.dp) if asked.to == TO else None

    def left_out(self) -> tuple[str, ...]:
        if any(name.startswith("extra_state") for name in self.files):
            return ("the extra_state files (schedule and random states) are not carried over",)
        return ()


def _write(content: Content, asked: Asked, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    mend = "--to dcp, which FSDP2 loads, or load it with ds_reshard.dcp.Reader"
    what = "is not converted to this: files of EasyR1 and verl are made of theirs alone"
    fault = UnsupportedLayout.fault(content.folder, what, found=f"--to {asked.to}", mend=mend)
    raise_faults([*faults, fault], subject="converting")
    raise AssertionError


FSDP = folder_format(
    "files of FSDP ranks", is_fsdp, list_fsdp, open_fsdp, opened=OpenedFsdp, writes={TO: _write}, sized=frozenset({TO})
)
