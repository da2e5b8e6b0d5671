"""`python -m ds_reshard`, the same as the command `ds-reshard`."""

from __future__ import annotations

from ds_reshard.cli.main import main

raise SystemExit(main())
