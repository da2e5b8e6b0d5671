"""The command `ds-reshard`: the only part of the package that prints and sets an exit status."""
