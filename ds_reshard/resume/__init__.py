"""What was asked of a load and what happened: the resume policy. Empty until flags are parsed into it."""
