"""`import ds_reshard.auto`: every host that this process imports, before or after, is patched.

Loads no framework. A host that does not look as its table says is left as it is, with one warning.
`DS_RESHARD_DISABLE=1` in the environment makes this import do nothing; `ds_reshard.uninstall` undoes it.
"""

from __future__ import annotations

import os

from ds_reshard.hooks import install_on_import
from ds_reshard.hosts import tables

if os.environ.get("DS_RESHARD_DISABLE", "") in ("", "0"):
    for _table in tables():
        install_on_import(_table)
