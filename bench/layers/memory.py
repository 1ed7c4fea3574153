"""What a way keeps between forward and backward, and what its step takes at the peak."""

from __future__ import annotations

from typing import Any

from bench.layers.subjects import Forward, Subject
from fused_remat.report.allocations import AllocationTrace, SavedBytes, measure_allocations


def memory(forward: Forward, subject: Subject, kept_by: str = "autograd") -> dict[str, Any]:
    """Bytes, parameters and the caller's masks apart; the output, too, is the caller's.

    "kept_bytes" is what is kept for backward, the input included where it is: by autograd's account
    (`SavedBytes`), or where some of it lies elsewhere, by the allocator's, as "kept_by" says.
    "held_bytes" is always the allocator's. Peaks are above what is there before; backward's is
    above what forward left.
    """
    sample, device = subject.sample, subject.device
    kept = None
    if kept_by == "autograd":
        with SavedBytes([*sample.layer.parameters(), *subject.masks]) as saved:
            forward(sample.x)
        kept = saved.total
        del saved  # it holds what it counted
    # A copy of the input that nobody else holds, and of the output only what backward needs.
    held = measure_allocations(lambda: forward(sample.x.clone()).grad_fn, device).net
    with AllocationTrace(device) as trace:
        y = forward(sample.x)
        trace.mark("backward")
        y.backward(sample.dy)
        del y
    first, second = trace.spans
    kept = held if kept is None else kept
    return {
        "kept_bytes": kept,
        "kept_by": kept_by,
        "kept_bytes_per_token": kept / sample.x[..., 0].numel(),
        "held_bytes": held,
        "forward_peak_bytes": first.peak,
        "backward_peak_bytes": second.peak - second.start,
        "step_peak_bytes": max(first.peak, second.peak),
    }
