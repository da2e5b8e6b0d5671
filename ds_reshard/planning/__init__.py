"""Plans: the copies from one layout to another. Pure functions, with the same result on every rank."""
