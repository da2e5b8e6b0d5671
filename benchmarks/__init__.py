"""Side-by-side runs against other ways of doing the same; see README.md. Nothing here asserts a time."""
