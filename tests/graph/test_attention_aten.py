"""How PyTorch's private attention operators are called: their schemas, and what is asked of them.

On tensors without memory, and by stand-ins; a GPU runs them in `tests/kernels`.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_calls import call_of
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat.steps import attention_aten as operators
from fused_remat.steps.attention import attention_fwd

BF16, F32 = torch.bfloat16, torch.float32


SCHEMAS = [
    line.split("\t") for line in Path(__file__).with_name("schemas.tsv").read_text().splitlines()
]


@pytest.mark.parametrize("version, schema", SCHEMAS, ids=lambda text: text.partition("(")[0])
def test_every_supported_version_has_the_operators_as_they_are_called(version, schema):
    """The committed schemas are those of each version's wheel; of this one, those it has."""
    name = schema.partition("(")[0]
    parsed = torch._C.parse_schema(f"aten::{schema}")
    assert operators.fits(name, parsed)
    if torch.__version__.startswith(version):
        assert str(parsed) == str(getattr(torch.ops.aten, name).default._schema)


def test_a_schema_that_differs_is_noticed():
    schema = SCHEMAS[0][1]
    name = schema.partition("(")[0]
    assert {row[1].partition("(")[0] for row in SCHEMAS} == set(operators.SIGNATURES)
    for old, new in (
        ("Tensor query", "Tensor q"), ("float? scale=None", "float scale"), ("Tensor key, ", ""),
        (", *,", ", int more, *,"), ("dropout_p", "dropout"),
    ):  # fmt: skip
        changed = torch._C.parse_schema("aten::" + schema.replace(old, new))
        assert operators.fits(name, changed) == (new == "float scale"), new


CALLS = {
    "flash": {},
    "flash causal": {"right": 0},
    "flash window": {"right": 0, "left": 8},
    "flash varlen": {"cu": True},
    "cudnn": {},
    "cudnn masked": {"mask": True},
    "efficient": {},
    "efficient masked": {"mask": True},
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("case", CALLS)
def test_operators_are_called_as_their_schemas_say(case, kv_heads):
    """On tensors without memory: shapes and dtypes."""
    options, name = dict(CALLS[case]), case.split()[0]
    if name == "efficient" and kv_heads < 4:
        pytest.skip("is called for each member of a group")
    with FakeTensorMode():
        b, m, n = (1, 50, 50) if "cu" in options or "right" in options else (2, 33, 50)
        q = torch.empty(b, 4, m, 64, dtype=BF16, device="cuda")
        k, v = (torch.empty(b, kv_heads, n, 64, dtype=BF16, device="cuda") for _ in range(2))
        if options.pop("cu", None):
            options |= dict.fromkeys(
                ("cu_q", "cu_k"), torch.empty(4, dtype=torch.int32, device="cuda")
            )
        bias = (
            torch.empty(b, 1, m, n, dtype=BF16, device="cuda")
            if options.pop("mask", None)
            else None
        )
        call = call_of((q, k), **options)
        at = operators.Kernel(name, bias)
        attn, lse = operators.run(at, q, k, v, call)
        grads = operators.run_backward(at, attn, q, k, v, attn, lse, call)
    assert attn.shape == q.shape and attn.dtype == BF16
    assert lse.shape == q.shape[:3] and lse.dtype == F32
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def flash_in_float64(q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, **named):
    """What FlashAttention computes, from its documentation; rows outside sequences are NaN."""
    if cu_q is None:
        of_one = [
            flash_in_float64(*heads, *(torch.tensor([0, len(x)]) for x in heads[:2]), max_q, max_k,
                             p, causal, debug, **named)
            for heads in zip(q, k, v, strict=True)
        ]  # fmt: skip
        return tuple(map(torch.stack, zip(*of_one, strict=True)))
    left, right = named["window_size_left"], 0 if causal else named["window_size_right"]
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    of_q, of_k = (itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k))
    for (lo, hi), (first, end) in zip(of_q, of_k, strict=True):
        group, n = q.shape[1] // k.shape[1], end - first
        keys, values = (x[first:end].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihe,jhe->hij", q[lo:hi], keys) * named["scale"]
        ahead = torch.arange(n) - (torch.arange(hi - lo) + n - (hi - lo))[:, None]
        hidden = (ahead > right) & (right >= 0) | (ahead < -left) & (left >= 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse[:, lo:hi] = scores.logsumexp(-1).masked_fill(hidden.all(-1), torch.inf)
        out[lo:hi] = torch.einsum("hij,jhe->ihe", scores.softmax(-1).nan_to_num(), values)
    return out, lse


FLASH = {
    "window": {"left": 3, "right": 0},
    "window on both sides": {"left": 3, "right": 2},
    "causal, fewer queries": {"right": 0, "q_len": 5},
    "varlen causal": {"right": 0, "cu": [2, 5, 5, 9]},
    "varlen window": {"left": 2, "right": 0, "cu": [0, 4, 10], "q_cu": [0, 3, 10]},
}


@pytest.mark.parametrize("case", FLASH)
def test_flash_is_asked_for_what_our_rows_compute(case, monkeypatch):
    """Windows, alignment and sequences mean the same to FlashAttention as to the ATen body."""
    options = dict(FLASH[case])
    length, bounds = options.pop("q_len", 10), options.pop("cu", None)
    q, k, v = (
        torch.randn(1, h, n, 8, dtype=torch.float64) for h, n in ((4, length), (2, 10), (2, 10))
    )
    if bounds is not None:
        options["cu_k"] = torch.tensor(bounds)
        options["cu_q"] = torch.tensor(options.pop("q_cu", bounds))
    call = call_of((q, k), **options)
    attn, lse = attention_fwd(q, k, v, call)
    aten = SimpleNamespace(_flash_attention_forward=flash_in_float64)
    monkeypatch.setattr(operators, "_aten", aten)
    found, found_lse = operators.run(operators.Kernel("flash"), q, k, v, call)
    torch.testing.assert_close(found.transpose(1, 2).reshape(attn.shape), attn)
    torch.testing.assert_close(found_lse.reshape(-1), lse.reshape(-1))
