"""Conformance kit: what every executor and every format must do, as suites to subclass. Imports torch.

    from ds_reshard.testing import ExecutorSuite

    class TestMyExecutor(ExecutorSuite):
        def make(self, *, threads, memory_nbytes, checksum):
            return MyExecutor(...)

The suites are plain classes: their `test_*` methods take no arguments, use assert and tempfile alone, and run
under pytest or by hand.
"""

from ds_reshard.testing.executor_suite import ExecutorSuite
from ds_reshard.testing.format_suite import FormatSuite, SavedCheckpoint

__all__ = ["ExecutorSuite", "FormatSuite", "SavedCheckpoint"]
