"""Activation functions and their derivatives, on tiles that a kernel holds: nothing is loaded.

A pair is `<name>_fwd(x) -> y` and `<name>_bwd(dy, x) -> (dx, y)`, in float32: backward yields the
activation too, because what the one needs is most of what the other costs. A kernel takes either
as a constexpr argument. The ATen twins are `fused_remat.backends.activations.ACTIVATIONS`.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """tanh without cancellation: its series about 0, else (1 - t) / (1 + t) of t = exp(-2|x|)."""
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def relu_fwd(x):
    """max(x, 0); NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def relu_bwd(dy, x):
    """dy where x > 0; and max(x, 0)."""
    return tl.where(x <= 0.0, 0.0, dy), tl.where(x <= 0.0, 0.0, x)


@triton.jit
def gelu_fwd(x):
    """x Φ(x), Φ the normal distribution function (Hendrycks, Gimpel 2016)."""
    return x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_bwd(dy, x):
    """dy (Φ(x) + x φ(x)); and x Φ(x)."""
    cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return dy * (cdf + x * pdf), x * cdf


@triton.jit
def gelu_tanh_fwd(x):
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_bwd(dy, x):
    """The gradient of `gelu_tanh_fwd`; and its value."""
    t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return dy * 0.5 * (1.0 + t + x * (1.0 - t * t) * inner), 0.5 * x * (1.0 + t)


@triton.jit
def silu_fwd(x):
    """x σ(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def silu_bwd(dy, x):
    """dy σ(x) (1 + x (1 - σ(x))); and x σ(x)."""
    s = tl.sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s)), x * s


@triton.jit
def tanh_fwd(x):
    """tanh(x)."""
    return _tanh(x)


@triton.jit
def tanh_bwd(dy, x):
    """dy (1 - tanh²(x)); and tanh(x)."""
    t = _tanh(x)
    return dy * (1.0 - t * t), t
