"""A call of a block: prepared, run, and by which implementations of its operations."""
