"""Synthetic: a stand-in for nanotron with the names and signatures that the hooks patch, written anew and far smaller.

Its files are those of commit 2411b02, and so is what it gets wrong: `make test-nanotron SRC=path` runs the hooks with
the real one.
"""

__version__ = "0.4"
