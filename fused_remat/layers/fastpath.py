"""PyTorch's inference kernel for this layer: where it is exact, and how to run without it.

`nn.TransformerEncoderLayer` in eval without gradients hands its parameters to one native kernel. On
torch 2.13 that kernel takes any finite non-zero value of a float mask for an exclusion
(pytorch#118628), gives NaN for rows whose keys are all excluded, computes GELU(tanh) as the exact
one and any later `layer.activation` as the first, skips dropouts left in training mode, and reads
weights instead of calling what stands in a child's place (LoRA, quantized layers, overrides).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fused_remat.layers import eligibility
from fused_remat.ops.activation import activation_name

#: What the kernel computes for `layer.activation_relu_or_gelu`; at 0 it is not used.
_COMPUTED = {1: "relu", 2: "gelu"}


def is_exact(layer: nn.TransformerEncoderLayer, params: Mapping[str, Tensor | None]) -> bool:
    """Whether the kernel computes what the layer says, in eval and without masks.

    >>> layer = nn.TransformerEncoderLayer(8, 2, activation=nn.GELU(approximate="tanh"))
    >>> is_exact(layer.eval(), {})
    False
    """
    if layer.training or eligibility.why_not_module(layer) is not None:
        return False
    flag = layer.activation_relu_or_gelu
    if flag and _COMPUTED.get(flag) != activation_name(layer.activation):
        return False
    # It crashes on a missing bias or norm weight, unless all are missing.
    return None not in params.values() and not any(eligibility.dropout_ps(layer))


def padded(forward: Callable[..., Tensor], src: Tensor) -> Tensor:
    """`forward` on a strided nested tensor, as one padded batch; nested again.

    >>> src = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    >>> out = padded(lambda x, src_key_padding_mask: x + src_key_padding_mask.sum(), src)
    >>> [tuple(rows.shape) for rows in out.unbind()], out[0][0, 0].item()
    ([(2, 4), (3, 4)], 2.0)
    """
    lengths = [len(sequence) for sequence in src.unbind()]
    x = src.to_padded_tensor(0.0)
    positions = torch.arange(x.shape[1], device=src.device)
    excluded = positions >= torch.tensor(lengths, device=src.device).unsqueeze(1)
    out = forward(x, src_key_padding_mask=excluded)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    nested: Tensor = torch.nested.as_nested_tensor(rows)
    return nested


_lock = threading.Lock()
_running = 0
_before = True


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Layers called inside run their submodules, whatever the mode.

    The switch is PyTorch's and global: the last of several threads to leave turns it back.

    >>> with off():
    ...     torch.backends.mha.get_fastpath_enabled()
    False
    >>> torch.backends.mha.get_fastpath_enabled()
    True
    """
    global _running, _before
    with _lock:
        if _running == 0:
            _before = torch.backends.mha.get_fastpath_enabled()
        _running += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                torch.backends.mha.set_fastpath_enabled(_before)
