"""What every format must say, of folders that real ranks have saved once and every test copies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from ds_reshard.model.index import Index
from ds_reshard.testing import FormatSuite, SavedCheckpoint


class KeptFolders(FormatSuite):
    """A subclass is parametrized by `size`, the number of ranks, and says how its format is opened.

    The fixture `folders` gives the folder that so many ranks have saved, and the tensors that it holds.
    """

    opened: Callable[[str], Any]

    @pytest.fixture(autouse=True)
    def _of_size(self, folders: Any, size: int) -> None:
        self._kept, self._truth = folders(size)

    def make(self, folder: str) -> SavedCheckpoint:
        shutil.copytree(self._kept, folder, dirs_exist_ok=True)

        def opened() -> Index:
            checkpoint = self.opened(folder)
            return Index(checkpoint.layout, checkpoint)

        return SavedCheckpoint(open=opened, truth=self._truth)
