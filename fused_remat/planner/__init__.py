"""Finds what to keep, and what to run again, for a training step to fit a budget of bytes."""
