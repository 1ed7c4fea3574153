"""Wrong arguments of mixtures of experts name the argument and its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.ops import moe

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "alpha": ({"activation": "clamped_swish", "limit": 1.0}, ValueError, "alpha=0.0"),
    "best of no group": (
        {"groups": 2, "best": 3},
        ValueError,
        "best must be from 1 to .* 2, got 3",
    ),
    "best of none": ({"best": 0}, ValueError, "best must be from 1"),
    "best without groups": ({"best": 9}, ValueError, "best must be from 1 to .* 4, got 9"),
    "groups": ({"groups": 0}, ValueError, "groups=0"),
    "groups of floats": ({"groups": 2.0}, TypeError, "groups must be an int, got 2.0"),
    "interleaved": ({"interleaved": True, "gated": False}, ValueError, "interleaved=True"),
    "limit": ({"limit": 7.0}, ValueError, "limit=7.0"),
    "no down": ({"down_weight": None}, TypeError, "down_weight must be a Tensor, got None"),
    "no router": ({"router_weight": None}, TypeError, "router_weight must be a Tensor, got None"),
    "no up": ({"up_weight": None}, TypeError, "up_weight must be a Tensor, got None"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_arguments_are_named(name: str) -> None:
    options, error, message = WRONG[name]
    given = {
        "router_weight": torch.randn(4, 8), "up_weight": torch.randn(4, 6, 8),
        "down_weight": torch.randn(4, 8, 3), "top_k": 2,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        moe(torch.randn(2, 8), **(given | options))


def test_a_limit_without_its_gate_is_no_spec() -> None:
    with pytest.raises(ValueError, match=r"limit=1\.0"):
        ExpertsSpec(experts=2, top_k=1, limit=1.0)
