"""The model of `python -m fused_remat scale`, beside runs of one, two and four processes."""
