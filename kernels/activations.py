"""Activation functions and their derivatives, on tiles that a kernel holds: nothing is loaded.

A pair is `<name>_fwd(x) -> y` and `<name>_bwd(dy, x) -> (dx, y)`, in float32: backward yields the
activation too, because what the one needs is most of what the other costs. A kernel takes either
as a constexpr argument. The ATen twins are `fused_remat.steps.activation.ACTIVATIONS`.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    """Compute tanh without cancellation: a series at 0, else (1 - t) / (1 + t), t = exp(-2|x|)."""
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
    """Return dy where x > 0; and max(x, 0)."""
    return tl.where(x <= 0.0, 0.0, dy), tl.where(x <= 0.0, 0.0, x)


@triton.jit
def _normal(x):
    """Φ(x), the normal distribution function, and exp(-x²/2), which the two have in common.

    1 - Φ(|x|) = exp(-x²/2) t P(t) with t = 1 / (1 + |x| / √8), P of degree 8: the form of
    Hastings 1955, fitted anew (Remez) to a relative error of 8e-8, so that the tail is right too.
    Half the instructions of erf and exp.
    """
    t = 1.0 / (1.0 + 0.35355339059327376 * tl.abs(x))
    p = -0.028460325673222542
    p = p * t + 0.1377478986978531
    p = p * t - 0.23562821745872498
    p = p * t + 0.13150230050086975
    p = p * t - 0.009173565544188023
    p = p * t + 0.10000942647457123
    p = p * t + 0.1217922568321228
    p = p * t + 0.14116643369197845
    p = p * t + 0.14104384183883667
    bell = tl.exp2(x * x * -0.7213475204444817)  # log2(e) / 2
    tail = p * t * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
def gelu_fwd(x):
    """Return x Φ(x), Φ the normal distribution function (Hendrycks, Gimpel 2016)."""
    cdf, _ = _normal(x)
    return x * cdf


@triton.jit
def gelu_bwd(dy, x):
    """Return dy (Φ(x) + x φ(x)); and x Φ(x)."""
    cdf, bell = _normal(x)
    return dy * (cdf + 0.3989422804014327 * (x * bell)), x * cdf


@triton.jit
def gelu_tanh_fwd(x):
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_bwd(dy, x):
    """Return the gradient of `gelu_tanh_fwd`; and its value."""
    t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return dy * 0.5 * (1.0 + t + x * (1.0 - t * t) * inner), 0.5 * x * (1.0 + t)


@triton.jit
def silu_fwd(x):
    """Return x σ(x)."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))  # log2(e)


@triton.jit
def silu_bwd(dy, x):
    """Return dy σ(x) (1 + x (1 - σ(x))); and x σ(x)."""
    s = 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
    return dy * (s + x * (s - s * s)), x * s


@triton.jit
def tanh_fwd(x):
    """tanh(x)."""
    return _tanh(x)


@triton.jit
def tanh_bwd(dy, x):
    """Return dy (1 - tanh²(x)); and tanh(x)."""
    t = _tanh(x)
    return dy * (1.0 - t * t), t


@triton.jit
def relu2_fwd(x):
    """max(x, 0)², squared ReLU (So et al. 2021, "Primer")."""
    y = relu_fwd(x)
    return y * y


@triton.jit
def relu2_bwd(dy, x):
    """2 dy max(x, 0); and max(x, 0)²."""
    y = relu_fwd(x)
    return tl.where(x <= 0.0, 0.0, 2.0 * dy * y), y * y
