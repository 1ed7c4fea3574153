"""The Triton backend: launches, which tile and route each takes, and the backend itself."""
