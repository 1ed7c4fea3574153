"""Problems of ops: inputs, the math itself, and the work it takes.

A provider returns a function of the inputs, which is timed through autograd, or `Ways`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.measure.checks import exact_in_blocks
from bench.measure.contest import SETS, Contest, Results, Rig, Way, Work
from bench.measure.registry import Provider, Registry, refusal
from bench.subjects.mixtures import Mixture
from fused_remat.scale.shapes import MODELS, Model

DIRECTIONS = ("fwd", "bwd")
#: Computes the op of the problem's inputs, given in their order.
Function = Callable[..., Tensor]
#: Ways of some of the directions, by name.
Ways = Mapping[str, Way]
Build = Callable[[Any], "Function | Ways"]


@dataclass(frozen=True)
class Size:
    """A model's or mixture's shapes at a batch (B) and sequence length (S)."""

    model: Any
    batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def at_tokens(model: Model | Mixture, tokens: int) -> Size:
    """Return about so many tokens: sequences of the model's length, or one shorter sequence."""
    seq_len = min(model.seq_len, tokens) if isinstance(model, Model) else tokens
    return Size(model, max(1, tokens // seq_len), seq_len)


def tiny(model: Model | Mixture) -> Model | Mixture:
    """Return the same kind of model in sizes that show only whether it runs."""
    if isinstance(model, Mixture):
        return dataclasses.replace(model, d_model=32, expert=48, experts=4, top_k=2)
    kv_heads = 2 if model.kv_heads < model.nhead else 4
    sizes = {"d_model": 32, "nhead": 4, "kv_heads": kv_heads, "head_dim": 8, "d_ff": 48}
    sizes["vocab"] = min(model.vocab, 100)
    return dataclasses.replace(model, seq_len=min(model.seq_len, 16), **sizes)


@dataclass(eq=False)
class Problem:
    """An op at a size. Subclasses have its sizes as fields; inputs, math and work are theirs."""

    factor: ClassVar[float] = 1.0  # how many times `TOLERANCE` a result may be off
    mean: ClassVar[float] = 0.0  # of x
    rig: Rig
    name: str  # which form of the op
    shapes: ClassVar[Mapping[str, Sequence[int]]]  # of the inputs, in the order of the arguments

    @functools.cached_property
    def sizes(self) -> dict[str, Any]:
        """The fields of its subclass, which distinguish its cases."""
        own = [field.name for field in dataclasses.fields(self)[2:] if field.init]
        return {name: getattr(self, name) for name in own}

    def draw(self) -> dict[str, Tensor]:
        """Return fresh inputs, each of which gets a gradient: results are about as large as x."""
        drawn = {}
        for name, shape in self.shapes.items():
            matrix, vector = ("weight" in name and len(shape) == n for n in (2, 1))
            scale = shape[-1] ** -0.5 if matrix else 1.0
            shift = 1.0 if vector else self.mean if name == "x" else 0.0
            drawn[name] = self.rig.normal(*shape, scale=scale, shift=shift)
        return drawn

    def reference(self, *inputs: Tensor) -> Tensor:
        """Compute the op in PyTorch's own operators, in any dtype."""
        raise NotImplementedError

    def work(self, direction: str) -> Work:
        """Return FLOPs of the products, and the fewest bytes: each input and result once."""
        raise NotImplementedError

    @functools.cached_property
    def sets(self) -> list[dict[str, Tensor]]:
        return [self.draw() for _ in range(SETS)]

    @functools.cached_property
    def dys(self) -> list[Tensor]:
        """Gradients of the output."""
        with torch.no_grad():
            shape = self.reference(*self.sets[0].values()).shape
        return [self.rig.normal(*shape) for _ in range(SETS)]

    @functools.cached_property
    def _exact(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The first set's output and gradients in float64."""
        leaves = {k: t.double().requires_grad_() for k, t in self.sets[0].items()}
        with exact_in_blocks():
            y = self.reference(*leaves.values())
        grads = torch.autograd.grad(y, list(leaves.values()), self.dys[0].double())
        return y.detach(), _gradients(leaves, grads)

    def truth(self, direction: str) -> Results:
        """Return the exact results; a backward whose output is wrong gets no time."""
        y, gradients = self._exact
        return {"y": y} if direction == "fwd" else {"y": y, **gradients}


def _gradients(names: Iterable[str], grads: Iterable[Any]) -> dict[str, Tensor]:
    return {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def through_autograd(function: Function, problem: Problem, optional: bool) -> dict[str, Way]:
    """Return both directions of a function; a backward's results hold the output too."""

    def inputs(index: int) -> list[Tensor]:
        return [t.detach().requires_grad_() for t in problem.sets[index].values()]

    def forward(leaves: list[Tensor]) -> Results:
        return {"y": function(*leaves)}  # with what it saved, which is not freed on the clock

    def graph(index: int) -> tuple[Tensor, list[Tensor], Tensor]:
        leaves = inputs(index)
        return function(*leaves), leaves, problem.dys[index]

    def backward(given: tuple[Tensor, list[Tensor], Tensor]) -> Results:
        y, leaves, dy = given
        # `y.backward` would copy into `.grad` a gradient with other strides than its leaf's.
        grads = torch.autograd.grad(y, leaves, dy)
        return {"y": y.detach(), **_gradients(problem.sets[0], grads)}

    return {"fwd": Way(forward, optional, inputs), "bwd": Way(backward, optional, graph)}


def _compiled(problem: Problem) -> Function:
    torch._dynamo.reset()
    return torch.compile(problem.reference, dynamic=False)


class Op(Registry[Build]):
    """The providers of an op; `of_model` gives the problems that one of `models` has at a size."""

    def __init__(
        self, name: str, of_model: Callable[[Rig, Size], Iterable[Problem]], stock: bool = True,
        models: Mapping[str, Model] | Mapping[str, Mixture] = MODELS,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.of_model, self.models = name, of_model, models
        if stock:
            self.provider("aten", baseline=True)(lambda p: p.reference)
            self.provider("compile")(_compiled)

    def ours(self, *forms: str) -> Callable[[Build], Build]:
        """Register ours for ATen and Triton: a function of the problem, a backend and a form."""

        def register(build: Build) -> Build:
            for backend, needs in (("eager", None), ("triton", "triton")):
                for form in [[form] for form in forms] or [[]]:
                    name = " ".join(["fused_remat", backend, *form])
                    one = lambda p, given=(backend, *form): build(p, *given)  # noqa: E731
                    self.provider(name, needs=needs)(one)
            return build

        return register


def ways_of(provider: Provider[Build], problem: Problem) -> Ways:
    """Return a provider's ways of all directions. Raises: Absent, or what building it raises."""
    made = provider.make(problem.rig.device, problem)
    if isinstance(made, Mapping):
        return made
    return through_autograd(made, problem, bool(provider.traits.get("optional")))


def contests(
    op: Op, problem: Problem, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Contest]]:
    """Yield a contest for each direction, with all providers, or those of `names`."""
    built: dict[str, Ways] = {}
    refused: dict[str, dict[str, str]] = {}
    for name in op if names is None else names:
        try:
            built[name] = ways_of(op[name], problem)
        except ImportError as error:
            refused[name] = {"absent": str(error)}
        except Exception as error:  # one broken provider must not cost the others' results
            refused[name] = refusal(error, bool(op[name].traits.get("optional")))
    for direction in DIRECTIONS:
        ways = {name: made[direction] for name, made in built.items() if direction in made}
        yield direction, Contest(
            ways, functools.partial(problem.truth, direction), problem.work(direction),
            op.baselines, problem.factor, refused,
        )  # fmt: skip
