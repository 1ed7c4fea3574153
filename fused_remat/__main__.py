"""`python -m fused_remat`: see `fused_remat.cli`."""

from fused_remat.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
