"""The version of the package, here so that any module can read it."""

__version__ = "0.1.0"
