"""The steps of a block: operations, each with its contract and its ATen body."""
