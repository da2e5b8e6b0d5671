"""First on PYTHONPATH, it puts the hooks into each interpreter that starts, pytest's workers among them."""

import ds_reshard.auto  # noqa: F401
