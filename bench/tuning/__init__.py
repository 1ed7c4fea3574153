"""Which route and which tile is ours: contests of our own kernels, as `bench gpu` measures them."""
