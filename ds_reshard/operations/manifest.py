"""`ds_reshard.json`: what lies beside the tags of an output: every file with its size and checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ds_reshard.containers.crc import crc32

MANIFEST = "ds_reshard.json"


def manifest_text(content: Mapping[str, object]) -> str:
    """The manifest as it is written, with a checksum of its own."""
    return json.dumps({**content, "crc32": _checksum(content)}, sort_keys=True, indent=1)


def read_manifest(path: str) -> Mapping[str, object] | None:
    """The manifest of an output, None where there is none. Raises ValueError where it is not what was written."""
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(manifest, dict):
        raise ValueError("it holds no object")
    expected = manifest.pop("crc32", None)
    found = _checksum(manifest)
    if expected is not None and expected != found:
        raise ValueError(f"its checksum is {found}, and {expected!r} was written")
    return manifest


def _checksum(content: Mapping[str, object]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True).encode('utf-8')):08x}"
