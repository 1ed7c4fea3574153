"""The products of experts: oneDNN's and grouped ones against the loop with ATen's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_experts import WIDTH, graph_of, tensors_for
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.execution import choose
from fused_remat.execution.prepare import BlockConfig, chunks_of
from fused_remat.moe_spec import ExpertsSpec, RouterSpec
from fused_remat.policies import Policy
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import cpu_choice, experts, experts_cpu, experts_grouped, experts_loop
from fused_remat.steps.stacks import FORMS, Adapter, Into, Operands, Stack, StackGrads

KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "clamped": {
        "activation": "clamped_swish", "interleaved": True, "transposed": True, "limit": 1.5,
        "alpha": 1.7,
    },
    "relu2": {"activation": "relu2", "gated": False},
    "weighs_input": {"weighs_input": True, "transposed": True},
    "adapted": {},
    "adapted and transposed": {"transposed": True},
}  # fmt: skip
#: Experts of each of 11 tokens, in turn; of 6 experts some have no tokens, and 9 is none of them.
CHOICES = {
    "odd groups": [[0, 3], [3, 5], [0, 1], [5, 3], [3, 1], [0, 3]],
    "one expert": [[4, 4]],
    "dropped": [[0, 9], [9, 9], [3, 0], [-1, 5]],
    "none": [[9, -1]],
}
T, E = 11, 6
Widths = tuple[int, int]


class Problem:
    """Experts with biases, and what their operations take."""

    def __init__(
        self, kind: str, choice: str, dtype: torch.dtype = torch.float32, widths: Widths = (16, 24)
    ) -> None:
        self.spec = ExpertsSpec(experts=E, top_k=2, **KINDS[kind])
        (d, h), generator = widths, torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        rows = h * (1 + self.spec.gated)
        up, down = (rows, d), (d, h)
        up, down = (up[::-1], down[::-1]) if self.spec.transposed else (up, down)
        turned = self.spec.transposed
        self.up = Stack(normal(E, *up), normal(E, rows), turned)
        self.down = Stack(normal(E, *down), None if turned else normal(E, d), turned)
        if kind.startswith("adapted"):  # as PEFT stores B: (out, rank * E)
            self.up, self.down = (
                stack._replace(
                    adapters=(
                        Adapter(
                            normal(E, 8, stack.in_features),
                            normal(stack.out_features, 8, E).permute(2, 0, 1),
                            0.5,
                        ),
                    )
                )
                for stack in (self.up, self.down)
            )
        self.x, self.dy = normal(T, d), normal(T, d)
        self.weights = normal(T, 2).float()
        chosen = CHOICES[choice]
        indices = torch.tensor([chosen[t % len(chosen)] for t in range(T)])
        self.order = experts.experts_order(indices, E)

    def grads(self, stack: Stack, fresh: bool) -> StackGrads:
        """Return buffers, of NaN if fresh, else of ones."""

        def buffer(t: Tensor | None) -> Into | None:
            return None if t is None else Into(torch.full_like(t, value), fresh)

        value = torch.nan if fresh else 1.0
        adapters = tuple((buffer(low.a), buffer(low.b)) for low in stack.adapters)
        return StackGrads(buffer(stack.weight), buffer(stack.bias), adapters)

    def run(self, module: Any, *products: Any, fresh: bool = True) -> list[Tensor]:
        """Return all that operations of a module return or write."""
        head, down = (*products, self.spec), (self.weights, self.order, self.down)
        pre = module.up_fwd(*head, self.x, self.weights, self.order, self.up)
        found = [module.down_fwd(*head, pre, *down)]
        for kept in (None, pre):
            grads = [self.grads(stack, fresh) for stack in (self.up, self.down)]
            read = Operands(
                self.spec, self.dy, self.x, kept, self.weights, self.order, self.up, self.down,
                True, True,
            )  # fmt: skip
            *_, given = module.bwd_stages(*products, read, lambda first=grads[0]: first, grads[1])
            found += given
            if module is experts_loop:  # the same, an expert at a time
                again = [self.grads(stack, fresh) for stack in (self.up, self.down)]
                check([*module.bwd(*products, read, *again)], [*given], 1e-6)
            found += [into.grad for each in grads for into in each.buffers]
        return found


def check(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max()))
        )


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the loop is one expert, without grouped products."""
    monkeypatch.setattr(experts_loop, "ROWS", 1)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("rows", [5, 256])
@pytest.mark.parametrize("choice", sorted(CHOICES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_runs_of_experts_give_what_one_at_a_time_gives(
    kind: str, choice: str, rows: int, fresh: bool, one_at_a_time: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Products of parts of a matrix may differ by alignment."""
    problem = Problem(kind, choice)
    expected = problem.run(experts_loop, experts_loop.ATEN, fresh=fresh)
    monkeypatch.setattr(experts_loop, "ROWS", rows)
    check(problem.run(experts_loop, experts_loop.ATEN, fresh=fresh), expected, 1e-6)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_widths_that_grouped_products_do_not_take(kind: str) -> None:
    found, expected = (
        Problem(kind, "odd groups", dtype, (6, 10)).run(experts_loop, experts_loop.ATEN)
        for dtype in (torch.float32, torch.float64)
    )
    check(found, [t.float() for t in expected], 1e-5)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("choice", sorted(CHOICES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_grouped_products_give_what_the_loop_gives(
    kind: str, choice: str, fresh: bool, one_at_a_time: None
) -> None:
    """On a CPU, where they run in float32; sums differ by their order."""
    problem = Problem(kind, choice)
    expected = problem.run(experts_loop, experts_loop.ATEN, fresh=fresh)
    check(problem.run(experts_grouped, fresh=fresh), expected, 1e-5)


def test_pairs_of_no_expert_come_last() -> None:
    order = experts.experts_order(torch.tensor([[-1, 5], [0, 6]]), E)
    assert order.pairs[:2].tolist() == [2, 1] and order.ends.tolist() == [1, 1, 1, 1, 1, 2]


def test_grouped_products_are_in_the_dtype_of_the_tokens() -> None:
    """Of 16 bits: sums of 24 products and biases are rounded to 8 bits a few times."""
    problem = Problem("swiglu", "odd groups", torch.bfloat16)
    expected = problem.run(experts_loop, experts_loop.ATEN)
    check(problem.run(experts_grouped), expected, 3e-2)


def test_grouped_products_run_where_no_count_is_read_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    spec, sizes = ExpertsSpec(experts=8, top_k=2), (1536, 2048)
    key = spec, torch.bfloat16, torch.device("cuda", 0), 64, sizes, torch.bfloat16, "plain"

    def reason(**changed: Any) -> str | None:
        names = ("spec", "dtype", "device", "rows", "sizes", "weight_dtype", "form")
        return experts_grouped.unsupported_reason(
            tuple((dict(zip(names, key, strict=True)) | changed).values())
        )

    assert reason() is None and experts.describe(key) == "PyTorch's grouped products"
    assert reason(device=torch.device("cpu")) == ""
    assert "counts on the host" in str(reason(dtype=torch.float32, weight_dtype=torch.float32))
    assert "counts" in str(reason(spec=dataclasses.replace(spec, experts=2048)))
    assert "quantized" in str(reason(form="quantized")) and reason(form="adapted") is None
    assert "not in multiples of 8" in str(reason(form=FORMS[2]))
    assert "16" in str(reason(sizes=(1536, 2056)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "counts on the host" in str(reason())
    weight = torch.empty(8, 4, 4).bfloat16()
    exact = StackGrads(Into(weight, True, exact=True))
    monkeypatch.setattr(experts_grouped, "unsupported_reason", lambda key: None)
    assert experts_grouped.supports(key, Stack(weight))
    assert not experts_grouped.supports(key, Stack(weight), exact)
    assert not experts_grouped.supports(key, Stack(weight.transpose(1, 2)))
    a, b = torch.empty(8, 8, 4), torch.empty(4, 8, 8).permute(2, 0, 1)
    assert experts_grouped.supports(key, Stack(weight, adapters=(Adapter(a, b, 1.0),)))
    turned = Adapter(a.transpose(1, 2).contiguous().transpose(1, 2), b, 1.0)
    assert not experts_grouped.supports(key, Stack(weight, adapters=(turned,)))
    for rank, form in ((8, "adapted"), (4, FORMS[2])):
        adapter = Adapter(torch.empty(8, rank, 4), b[..., :rank], 1.0)
        assert Stack(weight, adapters=(adapter,)).form == form


@pytest.mark.skipif(cpu_choice._ONEDNN is None, reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_onednn_products_give_what_atens_give(kind: str) -> None:
    for choice in sorted(CHOICES):
        problem = Problem(kind, choice)
        for fresh in (True, False):
            expected = problem.run(experts_loop, experts_loop.ATEN, fresh=fresh)
            check(problem.run(experts_loop, experts_cpu.ONEDNN, fresh=fresh), expected, 1e-5)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cpu_choice.PRODUCTS, "onednn")
    choose.forget()
    yield
    monkeypatch.undo()
    choose.forget()


@pytest.mark.skipif(cpu_choice._ONEDNN is None, reason="this PyTorch has no oneDNN")
def test_the_average_rows_of_an_expert_choose_onednn(
    forced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ExpertsSpec(experts=2, top_k=1)
    x, up = torch.empty(1024, 256), Stack(torch.empty(2, 256, 256))
    for tokens, dtype, other in (
        (1024, torch.float32, True), (512, torch.float32, False), (1024, torch.float64, False),
    ):  # fmt: skip
        order = experts.experts_order(torch.zeros(tokens, 1), 2)
        found = choose.choose(
            experts.experts_up_fwd, "eager", experts.key(spec, x.to(dtype), order, up)
        )
        assert (found.run is not experts.experts_up_fwd) == other
        assert ("slower at this size" in found.reason()) == (tokens == 512)
    called = []
    monkeypatch.setattr(cpu_choice, "_ONEDNN", lambda x, w, *_: called.append(x.shape) or x @ w.t())
    x, up = torch.randn(1024, 256), Stack(torch.randn(2, 256, 256))
    order = experts.experts_order(torch.zeros(1024, 1), 2)
    run = choose.ops_for("eager", x)[experts.experts_up_fwd]
    found = run(spec, x, None, order, up)
    torch.testing.assert_close(found, x @ up.weight[0].t(), rtol=1e-4, atol=1e-3)
    assert called == [(1024, 256)]
    with torch.backends.mkldnn.flags(enabled=False):
        run(spec, x, None, order, up)
    assert len(called) == 1


def test_a_chunk_on_a_cpu_has_enough_tokens_for_every_expert() -> None:
    """Up to 4 times as many as without experts, whose weights every chunk reads again."""
    for experts_, top_k, times in ((6, 6, 1), (6, 3, 2), (64, 2, 4)):
        router = RouterSpec(experts=experts_, top_k=top_k)
        spec = ExpertsSpec(experts=experts_, top_k=top_k)
        tensors = tensors_for(router, spec, False)
        tensors["input"] = torch.zeros(1, 8192, WIDTH)
        graph = graph_of(router, spec, False)
        call = BlockConfig(graph, frozenset(), frozenset(), "auto")
        given = [tensors.get(name) for name in graph.tensors]
        tokens = choose.chunk_tokens(torch.device("cpu"), torch.float32)
        assert call.prepare(given).chunks.tile == tokens * times
        with chunks_of(100):
            assert call.prepare(given).chunks.tile <= 100


@pytest.mark.parametrize("save", [set(), {"pre"}], ids=["full", "pre"])
@pytest.mark.parametrize("weighs_input", [False, True])
def test_gradients_of_both_stacks_are_not_held_together(save: set[str], weighs_input: bool) -> None:
    """Of large stacks, added into existing gradients: most of a step's peak in a mixture."""
    e, d, h = 16, 128, 64
    router = RouterSpec(experts=e, top_k=2)
    spec = ExpertsSpec(experts=e, top_k=2, weighs_input=weighs_input)
    graph = graph_of(router, spec, True)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input": (1, 32, d), "router.weight": (e, d), "up.weight": (e, 2 * h, d),
        "up.bias": (e, 2 * h), "down.weight": (e, d, h), "down.bias": (e, d),
    }  # fmt: skip
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.1).requires_grad_()
        for name, shape in shapes.items()
    }

    def step() -> None:
        run_block(graph, Policy(save=save), tensors).square().sum().backward()

    with chunks_of(16):  # by one step, for all tiles
        step()
    expected = [2 * t.grad for t in tensors.values() if t.grad is not None]
    for t in tensors.values():
        t.grad = None
    step()
    large = 4 * (tensors["up.weight"].numel() + tensors["down.weight"].numel())
    assert measure_allocations(step, "cpu").peak < 0.9 * large
    for t, grad in zip(tensors.values(), expected, strict=True):
        torch.testing.assert_close(t.grad, grad, rtol=1e-4, atol=1e-5)
