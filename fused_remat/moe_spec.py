"""Descriptions of mixtures of experts as plain data: the router, the experts, and a branch of both.

MoESpec: operation of a `spec.BranchSpec`
├── RouterSpec: which experts a token is sent to, and with which weights
├── ExpertsSpec: what each expert computes
└── MLPSpec: a shared expert, which all tokens are sent to
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fused_remat.spec import USER_FUNCTION, MLPSpec, linear_params

#: Activations of an expert's gate that are no entries of `steps.activation.ACTIVATIONS`.
CLAMPED = "clamped_swish"


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """A choice of `top_k` of `experts` for each token, by scores of the router's logits.

    Attributes:
        experts, top_k: the number of experts, and of those that a token is sent to.
        scores: "softmax" or "sigmoid" of all logits, of which the largest are chosen; or
            "top_k_softmax": the softmax of the chosen logits (gpt-oss).
        normalize: whether a token's weights are divided by their sum.
        scale: factor of the weights.
        groups, top_groups: with `groups` of experts next to each other, only those of the
            `top_groups` best groups are chosen (DeepSeek).
        best: how many of a group's best scores are summed to compare it with others.
        corrected: whether a bias, the param "router.correction" (E,), is added to the scores by
            which experts are chosen, not to the weights.
    """

    experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "top_k_softmax"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best: int = 1
    corrected: bool = False

    def __post_init__(self) -> None:
        if self.scores not in ("softmax", "sigmoid", "top_k_softmax"):
            raise ValueError(
                f"scores must be 'softmax', 'sigmoid' or 'top_k_softmax', got {self.scores!r}"
            )
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k must be from 1 to the number of experts, {self.experts}, got {self.top_k}"
            )
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"groups must divide the {self.experts} experts, and top_groups be at most that "
                f"number, got groups={self.groups} and top_groups={self.top_groups}"
            )
        if not 1 <= self.best <= self.experts // self.groups:
            raise ValueError(
                f"best must be from 1 to the experts of a group, {self.experts // self.groups}, "
                f"got {self.best}"
            )
        if self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(
                f"top_k={self.top_k} is more than the experts of {self.top_groups} groups"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """What each expert computes: down(act(up(x))).

    Attributes:
        activation: an entry of `steps.activation.ACTIVATIONS`, of up(x), or of the gate; or
            "clamped_swish": (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g), where g is
            min(gate, limit) (gpt-oss).
        gated: whether the first product has a gate and an up projection, side by side.
        interleaved: whether their columns alternate, gate first, instead.
        transposed: whether stacks are (E, in, out), instead of (E, out, in).
        weighs_input: whether weights multiply an expert's input, instead of its result (Llama 4).
        limit, alpha: of "clamped_swish".
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    weighs_input: bool = False
    limit: float = 0.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        clamped = self.gated and self.limit > 0.0 and self.alpha > 0.0
        if self.activation == CLAMPED and not clamped:
            raise ValueError(
                f"{CLAMPED!r} needs gated=True and a positive limit and alpha, got "
                f"gated={self.gated}, limit={self.limit} and alpha={self.alpha}"
            )
        if self.activation != CLAMPED and (self.limit or self.alpha):
            raise ValueError(
                f"limit and alpha are of {CLAMPED!r}, got limit={self.limit} and "
                f"alpha={self.alpha} with activation={self.activation!r}"
            )
        if self.interleaved and not self.gated:
            raise ValueError("interleaved=True needs gated=True, got gated=False")


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(ExpertSpec):
    """Experts with stacked weights: y = sum of weight * expert(x) over a token's experts.

    Attributes:
        experts, top_k: as in `RouterSpec`.
    """

    experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class MoESpec(ExpertSpec):
    """A mixture of experts: the weighted sum of a token's experts, and of a shared expert.

    A dense MLP that is added to them is a branch of its own, with `BranchSpec.parallel`.

    Attributes:
        router: the choice of experts; it also counts them.
        shared: an MLP that all tokens go through, or None.
        shared_gate: whether its result is multiplied by sigmoid of a linear layer of one column,
            "shared_router" (Qwen2-MoE).

    The layers are "router", and of the shared expert "shared_router", "shared_gate", "shared_fc1"
    and "shared_fc2"; the stacks are "experts_up" and "experts_down".
    """

    router: RouterSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        shared = self.shared
        if shared is None and self.shared_gate:
            raise ValueError("shared_gate=True needs a shared expert, got shared=None")
        if shared is not None and (shared.dropout or shared.activation == USER_FUNCTION):
            raise ValueError(
                "a shared expert needs the name of an activation and no dropout, got "
                f"activation={shared.activation!r} and dropout={shared.dropout}"
            )

    @property
    def experts(self) -> ExpertsSpec:
        """The experts without the router."""
        own = {f.name: getattr(self, f.name) for f in fields(ExpertSpec)}
        return ExpertsSpec(experts=self.router.experts, top_k=self.router.top_k, **own)

    @property
    def dropout(self) -> float:
        """The probability of dropout inside the mixture: there is none."""
        return 0.0

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        shared = self.shared.linears if self.shared else ()
        gate = ("shared_router",) if self.shared_gate else ()
        return ("router", *gate, *[f"shared_{name}" for name in shared])

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the tensors that no linear layer has."""
        correction = ("router.correction",) if self.router.corrected else ()
        return (*correction, *linear_params("experts_up", "experts_down"))

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear layer; `hidden` units of the shared expert."""
        shapes = {"router": (self.router.experts, width)}
        if self.shared_gate:
            shapes["shared_router"] = (1, width)
        for name, shape in self.shared.linear_shapes(width, hidden).items() if self.shared else ():
            shapes[f"shared_{name}"] = shape
        return shapes

    def stack_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `weights`; `hidden` units of each expert."""
        experts, rows = self.router.experts, hidden * (2 if self.gated else 1)
        shapes: dict[str, tuple[int, ...]] = {"router.correction": (experts,)}
        for name, out, columns in (("up", rows, width), ("down", width, hidden)):
            matrix = (columns, out) if self.transposed else (out, columns)
            shapes |= {f"experts_{name}.weight": (experts, *matrix)}
            shapes |= {f"experts_{name}.bias": (experts, out)}
        return shapes
