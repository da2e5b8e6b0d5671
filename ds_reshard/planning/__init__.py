"""From two layouts to the copies between them; pure, the same wherever it is computed."""
