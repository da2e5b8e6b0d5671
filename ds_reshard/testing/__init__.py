"""Conformance kit: what every executor and every format must do, as suites to subclass. Imports torch.

    from ds_reshard.testing import ExecutorSuite

    class TestMyExecutor(ExecutorSuite):
        def make(self, *, threads, memory_nbytes, checksum):
            return MyExecutor(...)

The suites are plain classes: their `test_*` methods take no arguments, use assert and tempfile alone, and run
under pytest or by hand.
"""

from ds_reshard.testing.suites import ExecutorSuite, FormatSuite, SavedCheckpoint

__all__ = ["ExecutorSuite", "FormatSuite", "SavedCheckpoint"]
