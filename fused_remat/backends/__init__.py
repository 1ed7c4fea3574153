"""Who does the arithmetic: a protocol, a registry, and the ATen backend for every device."""
