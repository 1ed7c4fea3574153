"""The steps of a mixture of experts: `add_moe`, which `graph.build` calls for a branch.

Steps and roles by which presets keep them: "router", the logits ("hidden"); "routing", the weights
of each token's experts ("routing"); "experts_up", the pre-activations of all pairs of a token and
an expert ("experts"); "experts", the weighted sum. The numbers of the chosen experts,
"routing.experts", are a statistic, which is always kept.

The pre-activations are (T, k * columns), however the tokens are distributed among experts and
however many pairs are dropped: bytes are known before the counts are. Where they are not kept, the
transients of a pass over the experts, one after the other, are those of the expert with the most
tokens, at most all tokens of a chunk: with n of them, about n * (2 * D + 3 * columns) elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fused_remat.moe_spec import MoESpec
from fused_remat.steps.mixture import ExpertsDown, ExpertStack, ExpertsUp, SigmoidScale
from fused_remat.steps.routing import Routing

if TYPE_CHECKING:
    from fused_remat.graph.build import BlockBuilder


def add_moe(b: BlockBuilder, spec: MoESpec, x: str, name: str = "", role: str = "") -> str:
    """Add a mixture of experts of x; return the name of the last step.

    name, role: of the last step; "" for "experts", or "moe" with a shared expert.
    """
    routing = _routing(b, spec, x)
    up, down = (
        ExpertStack(weight=f"experts_{part}.weight", bias=f"experts_{part}.bias")
        for part in ("up", "down")
    )
    given: Any = {"chosen": routing.chosen, "spec": spec.experts}
    weights = routing.name if spec.weighs_input else ""
    pre = ExpertsUp(name="experts_up", x=x, weights=weights, stack=up, role="experts", **given)
    b.add(pre)
    last = spec.shared is None
    experts = ExpertsDown(
        name=(name or "experts") if last else "experts", pre=pre.name, weights=routing.name,
        stack=down, role=role if last else "", **given,
    )  # fmt: skip
    b.add(experts)
    if spec.shared is None:
        return experts.name
    act = b.mlp(spec.shared, x, prefix="shared_")
    if spec.shared_gate:
        gate = b.linear("shared_router", x, "shared_router", role="hidden")
        act = b.add(SigmoidScale(name="shared_scaled", x=act, gate=gate))
    return b.linear(name or "moe", act, "shared_fc2", residual=experts.name, role=role)


def _routing(b: BlockBuilder, spec: MoESpec, x: str) -> Routing:
    """Add the router of x: its logits, and the choice of experts."""
    logits = b.linear("router", x, "router", role="hidden")
    tensors = ("router.correction",) if spec.router.corrected else ()
    node = Routing(
        name="routing", xs=(logits,), tensors=tensors, function="",
        what="weights of the chosen experts", role="routing", needed_for=((logits,),),
        tokenwise=True, chosen="routing.experts", experts=spec.router.experts,
        top_k=spec.router.top_k, router=spec.router,
    )  # fmt: skip
    b.add(node)
    return node
