"""What the tests of attention as a function share: heads, and masks of every kind."""

from reference_ops import normal


def heads(batch=2, nhead=4, kv_heads=2, q_len=5, kv_len=7, width=4, v_width=None, **kw):
    """query, key and value of (B, heads, S, E), leaves."""
    v_width = width if v_width is None else v_width
    shapes = ((nhead, q_len, width), (kv_heads, kv_len, width), (kv_heads, kv_len, v_width))
    return [normal(batch, *shape, seed=i, **kw) for i, shape in enumerate(shapes)]


def mask_of(kind, shape, seed=4):
    values = normal(*shape, seed=seed)
    if kind == "bool":
        return (values > -0.5).detach()
    if kind == "float32":
        return values.detach().float()
    return values if kind == "wants a gradient" else values.detach()
