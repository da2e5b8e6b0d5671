"""The conformance kit that a new format, executor or host is tested with."""
