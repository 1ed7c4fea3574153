"""Tracing of any layer: its operations become the graph of a block, proved by running both."""
