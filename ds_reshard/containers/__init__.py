"""Files as records: torch archives and pickles, read with every claim checked and nothing executed."""
