"""One folder or file a format: names and rules on top of containers; none imports another."""
