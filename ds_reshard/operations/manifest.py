"""`ds_reshard.json`: what lies beside the tags of an output: every file with its size and checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointNotFound, ReshardError

MANIFEST = "ds_reshard.json"
_MOST_NBYTES = 256 << 20


def manifest_text(content: Mapping[str, object]) -> str:
    """The manifest as it is written, with a checksum of its own."""
    return json.dumps({**content, "crc32": _checksum(content)}, sort_keys=True, indent=1)


def read_manifest(path: str) -> Mapping[str, object] | None:
    """The manifest of an output, None where there is none. Raises ValueError where it is not what was written."""
    try:
        file = PositionedFile(path)
        try:
            if file.nbytes > _MOST_NBYTES:
                raise ValueError(f"it has {file.nbytes} bytes, and at most {_MOST_NBYTES} are read")
            manifest = json.loads(file.read(0, file.nbytes))
        finally:
            file.close()
    except CheckpointNotFound:
        return None
    except (ReshardError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(manifest, dict):
        raise ValueError("it holds no object")
    expected = manifest.pop("crc32", None)
    found = _checksum(manifest)
    if expected != found:
        said = f"{expected!r} was written" if expected is not None else "none was written: its own entry is damaged"
        raise ValueError(f"its checksum is {found}, and {said}")
    return manifest


def _checksum(content: Mapping[str, object]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True).encode('utf-8')):08x}"
