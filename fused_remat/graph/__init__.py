"""Graphs of named activations, built from the description of a block."""
