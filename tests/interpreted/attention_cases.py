"""What the tests of attention's kernels share: calls, and their results against float64's."""

import dataclasses

import torch
from attention_calls import attention_call as call_of
from poisoned import TARGET, check_error, check_margin, poisoned

from fused_remat import random
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.triton import attention
from fused_remat.triton.tables import AttentionTile

KEY = random.site_keys(torch.tensor(5))[random.ATTENTION]
INF = float("inf")
SMALL = AttentionTile(16, 16, 4, 1)
# float32: sums of products in another order, and exponentials to 2 ulp of an argument of about 5.
# float16: the result, the probabilities and their gradients are rounded, by 2**-11 each.
FACTOR = 2


def attention_call(sizes, **options):
    """A call over (B, H, Hkv, S_q, S_k, E) without anything, but for `options`."""
    return call_of(sizes, **{"site_key": KEY, **options})


def packed_heads(sizes, dtype, value_width, make):
    """q, k, v as views of one matrix of packed projections, by `make(rows, width, dtype)`."""
    b, h, kv, m, n, e = sizes
    if m == n and value_width == e:
        whole = make(b * m, (h + 2 * kv) * e, dtype)
        heads = whole.view(b, m, h + 2 * kv, e).transpose(1, 2)
        return [whole], heads.split_with_sizes((h, kv, kv), 1)
    made = [
        make(b * m, h * e, dtype),
        make(b * n, kv * e, dtype),
        make(b * n, kv * value_width, dtype),
    ]
    shapes = ((b, m, h, e), (b, n, kv, e), (b, n, kv, value_width))
    return made, tuple(x.view(s).transpose(1, 2) for x, s in zip(made, shapes, strict=True))


def normal(rows, width, dtype):
    return torch.randn(rows, width).to(dtype)


def with_buffers(call, dtype):
    """The call with zeros for the gradients of those masks that have one."""
    wanted = {}
    for name in ("mask", "padding"):
        mask = getattr(call, name)
        if call.mask_grad and mask is not None and mask.is_floating_point():
            wanted[f"d{name}"] = torch.zeros(mask.shape, dtype=dtype)
    return dataclasses.replace(call, **wanted)


def exact_results(call, q, k, v, dattn):
    """Output and gradients by name, in float64."""
    q, k, v, dattn = (x.double() for x in (q, k, v, dattn))
    call = with_buffers(call, torch.float64)
    out, lse = attention_fwd(q, k, v, call)
    grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    attention_bwd(dattn, q, k, v, out, lse, call, grads)
    masks = {"dmask": call.dmask, "dpadding": call.dpadding}
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)) | masks


def check(sizes, dtype=torch.float32, value_width=None, tile=SMALL, inputs=None, **options):
    """Run the kernels on poisoned outputs; every result within rounding of float64's."""
    torch.manual_seed(0)
    call = attention_call(sizes, **options)
    width = sizes[5] if value_width is None else value_width
    _, (q, k, v) = packed_heads(sizes, dtype, width, normal)
    if inputs is not None:
        q, k, v = inputs(q, k, v)
    dattn = normal(sizes[0] * sizes[3], sizes[1] * width, dtype)
    found = run_kernels(call, q, k, v, dattn, tile)
    for name, exact in exact_results(call, q, k, v, dattn).items():
        if exact is not None:
            # A gradient that is all cancellation is 0 to rounding of what it is the difference of.
            terms = call.batch * call.spec.num_heads * call.q_len * call.kv_len / exact.numel()
            size = torch.full(
                (exact.numel(),), 0.1 * max(1.0, terms if "mask" in name else 1.0) ** 0.5
            )
            mine = torch.cat([found[name].double().flatten(), size])
            check_error(mine, torch.cat([exact.flatten(), size]), dtype, FACTOR)
    return found


def run_kernels(call, q, k, v, dattn, tile=SMALL):
    heads = call.spec.num_heads, call.spec.num_kv_heads
    sizes = (call.batch, *heads, call.q_len, call.kv_len, q.shape[-1])
    out = poisoned(*dattn.shape, q.dtype)
    lse = torch.full((call.batch, call.spec.num_heads, call.q_len), torch.nan)
    for launch in attention.forward(q, k, v, call, out, lse, TARGET, tile):
        launch.run()
    check_margin(out)
    assert not lse.isnan().any()
    call = with_buffers(call, torch.float32)
    wholes, grads = packed_heads(sizes, q.dtype, v.shape[-1], poisoned)
    tiles = (tile, tile)
    launches = attention.backward(dattn, q, k, v, out, lse, call, grads, TARGET, tiles)
    for launch in launches:
        launch.run()
    for whole in wholes:
        check_margin(whole)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    return found | {"dmask": call.dmask, "dpadding": call.dpadding, "lse": lse}


def spoiled_results(sizes, dtype, spoil, **options):
    torch.manual_seed(0)
    call = attention_call(sizes, **options)
    _, (q, k, v) = packed_heads(sizes, dtype, sizes[5], normal)
    dattn = normal(sizes[0] * sizes[3], sizes[1] * sizes[5], dtype)
    return run_kernels(call, *spoil(q, k, v), dattn)
