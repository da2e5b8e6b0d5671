"""Source patches for people who vendor Megatron-LM, made from the same table as the hooks.

    .venv/bin/python tests/hosts/megatron/vendored.py     writes patches/megatron/RELEASE/*.patch anew

Each is one file's worth of lines at its end: the functions that the hooks would replace go to the same seams, and a
marker for each tells the hooks to stand aside.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from releases import ROOT, WITH_TRAINING, home

from ds_reshard.hooks import Seam
from ds_reshard.hosts import table

PATCHES = ROOT / "patches" / "megatron"


def additions() -> dict[str, str]:
    """The lines that go to the end of each file, by the file's path in the release."""
    lines: dict[str, list[str]] = {}
    for patch in table("megatron").patches:
        path = patch.module.replace(".", "/") + ".py"
        assert isinstance(patch.wrapper, Seam)
        seam, target = patch.wrapper.target, ".".join(patch.path)
        imported = "from ds_reshard.hooks import Seam  # noqa: E402"
        block = lines.setdefault(path, ["", "", "# ds_reshard: " + "resume flags that mean what they say."])
        block += [imported] if imported not in block else []
        block += [f'{target} = Seam("{seam}")({target})', f"{patch.vendored_marker} = True"]
    return {path: "\n".join(block) + "\n" for path, block in lines.items()}


def patches(release: str) -> dict[str, str]:
    """The unified diffs of a release by file name."""
    made = {}
    for path, added in additions().items():
        before = (home(release) / path).read_text(encoding="utf-8")
        diff = difflib.unified_diff(
            before.splitlines(keepends=True), (before + added).splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
        made[Path(path).stem + ".patch"] = "".join(diff)
    return made


def main() -> int:
    for release in WITH_TRAINING:
        folder = PATCHES / release
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in patches(release).items():
            (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
