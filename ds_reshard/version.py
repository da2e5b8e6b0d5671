"""The version of ds_reshard, for what it writes into files."""

VERSION = "0.1.0"
