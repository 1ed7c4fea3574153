"""Measure log-probabilities and entropies of tokens, forward and backward, against TRL's.

    python -m bench log_probs --tokens 1024 --vocab 32000 --columns 1024 4096 32768

TRL's function takes a number of columns of the vocabulary at a time, 32768 in its trainers; all of
`--columns` are measured, and pages compare with the best of each. Hidden states and weights get
gradients, as in full fine-tuning. Bytes are the most that torch allocates above the inputs, in a
run of its own; times are the least of the rounds, in which the ways take turns.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.measure.machine import machine, synchronize, version
from bench.measure.options import Parser, positive, progress
from bench.pages import log_probs
from fused_remat import ops
from fused_remat.report.allocations import AllocationTrace

Both = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]


def ours(x: Tensor, weight: Tensor, target: Tensor) -> Sequence[Tensor]:
    return ops.token_log_probs(x, weight, target, entropy=True)


def trl(columns: int) -> Both:
    from trl.kernels import ChunkedLogProbFunction

    rest = 1.0, columns, None, 1.0, ("log_probs", "entropy")
    return lambda x, weight, target: ChunkedLogProbFunction.apply(x, weight, None, target, *rest)


def step(way: Both, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a policy loss with an entropy bonus."""
    log_probs, entropy = way(x, weight, target)[:2]
    loss = -log_probs.mean() - 0.1 * entropy.mean()
    return torch.autograd.grad(loss, [x, weight])


def measure(ways: dict[str, Both], given: tuple[Tensor, ...], rounds: int) -> dict[str, Any]:
    """Return peak bytes and the least seconds of each way, after comparing their gradients."""
    device, found, first = given[0].device, {}, None
    for name, way in ways.items():
        with AllocationTrace(device) as trace:
            grads = step(way, *given)
        (span,) = trace.spans
        found[name] = {"peak": span.peak - span.start, "seconds": float("inf")}
        first = first or grads
        # TRL rounds logits to the dtype, by less than 1% of a gradient's norm in bfloat16.
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(grads, first, strict=True)]
        assert max(errors) < 0.02, f"gradients of {name} differ by {errors}"
        del grads
    for _, name in itertools.product(range(rounds), ways):
        synchronize(device)
        start = time.perf_counter()
        step(ways[name], *given)
        synchronize(device)
        found[name]["seconds"] = min(found[name]["seconds"], time.perf_counter() - start)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure all sizes, add them to log_probs.json and print its table."""
    parser = Parser("log_probs", __doc__, "device rounds threads", rounds=3)
    parser.several("dtype")
    parser.several("tokens", type=positive, default=[1024, 8192])
    parser.several("vocab", type=positive, default=[32_000, 151_936])
    parser.several("columns", type=positive, default=[1024, 4096, 32_768])
    parser.add("--width", type=positive, default=512)
    args = parser.parse(arguments)
    ways = {"ours": ours, **{f"TRL, {n} columns": trl(n) for n in args.columns}}
    path = args.out / "log_probs.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    cases = list(itertools.product(args.dtype, args.tokens, args.vocab))
    for dtype, tokens, vocab in progress(cases, len(cases), "case"):
        how = {"dtype": getattr(torch, dtype), "device": args.device}
        torch.manual_seed(0)
        x = torch.randn(tokens, args.width, **how).requires_grad_()
        weight = torch.randn(vocab, args.width, **how).mul_(args.width**-0.5).requires_grad_()
        target = torch.randint(vocab, (tokens,), device=args.device)
        case = f"{dtype}, T = {tokens}, V = {vocab}, D = {args.width}"
        results[case] = measure(ways, (x, weight, target), args.rounds)
        data = {"machine": machine(args.device) | {"trl": version("trl")}, "results": results}
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
    print(log_probs.table(path))
    return 0
