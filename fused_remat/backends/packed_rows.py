"""Activations of packed inputs in ATen: a few rows at a time, so that nothing is unpacked whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_remat.backends.activations import ACTIVATIONS
from fused_remat.backends.base import Backend, Loaded
from fused_remat.formats import Packed


def _rows(x: Loaded, first: int, last: int) -> Tensor:
    return x.rows(first, last) if isinstance(x, Packed) else x[first:last]


def _spans(*loaded: Loaded | None) -> Iterator[tuple[int, int]]:
    return next(x for x in loaded if isinstance(x, Packed)).spans()


def _empty(x: Loaded) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def act_fwd(x: Packed, act: str) -> Tensor:
    """act(x)."""
    y = _empty(x)
    for first, last in x.spans():
        y[first:last].copy_(ACTIVATIONS[act].fwd(x.rows(first, last)))
    return y


def act_bwd(dy: Tensor, x: Packed, act: str, owned: bool) -> Tensor:
    """dy * act'(x), in dy if it is `owned`."""
    dx = dy if owned else _empty(x)
    for first, last in x.spans():
        ACTIVATIONS[act].bwd(dy[first:last], x.rows(first, last), dx[first:last])
    return dx


def gated_fwd(gate: Loaded, up: Loaded, act: str) -> Tensor:
    """act(gate) * up."""
    y = _empty(gate)
    for first, last in _spans(gate, up):
        made = ACTIVATIONS[act].fwd(_rows(gate, first, last))
        torch.mul(made, _rows(up, first, last), out=y[first:last])
    return y


def gated_bwd(
    backend: Backend,
    dy: Tensor,
    gate: Loaded,
    up: Loaded | None,
    act: str,
    owned: bool,
    wants_up: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """As `Backend.gated_bwd`, without dropout."""
    dup = _empty(gate) if wants_up else None
    dgate = None if up is None else dy if owned else _empty(gate)
    for first, last in _spans(gate, up):
        part = None if up is None else _rows(up, first, last)
        mine = _rows(gate, first, last)
        made = backend.gated_bwd(dy[first:last], mine, part, act, None, owned, wants_up)
        for whole, rows in zip((dgate, dup), made, strict=True):
            if whole is None or rows is None:
                continue
            target = whole[first:last]
            if rows.data_ptr() != target.data_ptr():  # not written there already
                target.copy_(rows)
    return dgate, dup
