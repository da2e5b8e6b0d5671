"""What a resume was asked to load, keep, override or reset, and what happened. Knows no host and no torch."""
