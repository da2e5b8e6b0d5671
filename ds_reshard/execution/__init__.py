"""Moving the bytes of a plan; knows no format."""
