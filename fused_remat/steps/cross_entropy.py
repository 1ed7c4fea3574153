"""Cross-entropy over the logits of a linear layer: two operations and the step.

Logits are computed a block at a time: some tokens by some columns of the vocabulary. Columns are
the outer loop, so a block of dweight is complete, and rounded, before the next one begins, and only
dx (T, D) is summed in float32 entirely. With tokens outside, all of dweight would be, which is as
large as the vocabulary.

Logits are float32 (float64 for float64). On a CPU, tokens with an ignored target cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fused_remat.spec import ParallelSpec
from fused_remat.steps import collective, linear
from fused_remat.steps.chunk import spans
from fused_remat.steps.logit_blocks import Span, add_product, block_of, product
from fused_remat.steps.node import Input, Node, Param, Shapes
from fused_remat.steps.operations import operation
from fused_remat.steps.token_losses import (
    CrossEntropyTargets,
    exponentials,
    is_read,
    losses,
    maximum,
    reductions,
    slopes,
    softmax_grad,
)

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


def key_of(x: Tensor, weight: Tensor, outputs: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return what the choice of an implementation depends on."""
    return x.dtype, x.device, x.shape, weight.shape, outputs


def describe_blocks(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    """Describe the operations for `explain`."""
    return f"blocks of logits, {linear.describe_product(key)}"


@operation(
    key=lambda x, weight, bias, call, *_: key_of(x, weight, call.outputs),
    description=describe_blocks,
)
def cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: CrossEntropyTargets,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the loss of each token with logits x @ weight.T + bias, and two statistics.

    These are the logits' maximum and log(sum(exp(logits - maximum))). All are (T, 1), in float32
    (float64 for float64). A weight and a bias of another dtype than x are rounded to that of x.
    All are 0 for ignored tokens. With `call.outputs` these are columns after the loss, and the
    entropy is also a statistic.

    Raises: IndexError on a CPU for a target out of range; on other devices, the device asserts.
    """
    check_targets(call, len(weight))
    tokens, wide = Tokens.of(x, call), linear.widens(x)
    count, vocab = len(tokens.target), len(weight)
    rows, columns = block_of(count, vocab, call.logits, x)
    blocks = list(spans(vocab, columns))
    like = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
    highs, sums = like.new_empty((count, len(blocks))), like.new_empty((count, len(blocks)))
    picked, total = like.new_zeros((count, 1)), like.new_zeros((count, 1))
    parts = reductions(call.outputs, like, count, len(blocks))
    for i, span in enumerate(blocks):
        block = Columns.of(weight, bias, span, x, wide)
        for lo, hi in spans(count, rows):
            z = block.logits(tokens.taken(x, lo, hi), call)
            at, inside = block.places(tokens.target[lo:hi])
            picked[lo:hi] += torch.where(inside, z.gather(1, at), 0)
            if call.label_smoothing or "mean_logits" in call.outputs:
                total[lo:hi] += z.sum(1, keepdim=True)
            made = {name: part[lo:hi, i : i + 1] for name, part in parts.items()}
            # All of a row may be -inf: without the clamp, exp(-inf + inf) would be NaN.
            high = maximum(z, span[0], made).clamp_(min=torch.finfo(z.dtype).min)
            highs[lo:hi, i : i + 1] = high
            sums[lo:hi, i : i + 1] = exponentials(z.sub_(high), made).sum(1, keepdim=True)
    call = replace(call, target=tokens.target)
    found = [tokens.whole(t) for t in losses(highs, sums, picked, total, vocab, call, parts)]
    return found[0] if out is None else out.copy_(found[0]), *found[1:]


@operation(
    key=lambda dy, x, weight, bias, stats, call, *_: key_of(x, weight, call.outputs),
    description=describe_blocks,
)
def cross_entropy_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stats: tuple[Tensor, ...],
    call: CrossEntropyTargets,
    needs_grad: tuple[bool, ...],
    exact: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias, summed in float32; one that `needs_grad` does not mark is None.

    dweight has the dtype of weight; if `exact`, it has at least float32 and is not rounded.
    """
    tokens, wide = Tokens.of(x, call), linear.widens(x)
    count, vocab = len(tokens.target), len(weight)
    dy = tokens.taken(dy, 0, count).to(stats[0].dtype)
    if tokens.used is not None:  # dy is infinite for a mean over no token
        dy = torch.where(tokens.used, dy, 0)
    stats = tuple([tokens.taken(s, 0, count) for s in stats])
    mass, spread, at_target, entropy = slopes(dy, stats, vocab, call)
    high, log_sum = stats[:2]
    if tokens.used is not None:  # without statistics exp(z) could be infinite, and inf * 0 is NaN
        high = high.masked_fill(~tokens.used, math.inf)

    def dlogits(block: Columns, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        x_part = tokens.taken(x, lo, hi).to(block.weight.dtype)
        z = block.logits(x_part, call)
        cap = 1 - (z / call.softcap).square_() if call.softcap else None
        z.sub_(high[lo:hi]).sub_(log_sum[lo:hi])
        softmax_grad(z, mass[lo:hi], None if entropy is None else entropy[lo:hi])
        if call.label_smoothing:
            z.add_(spread[lo:hi])
        at, inside = block.places(tokens.target[lo:hi])
        z.scatter_add_(1, at, torch.where(inside, at_target[lo:hi], 0))
        return x_part, z if cap is None else z.mul_(cap)  # of the logits before the soft-cap

    shape = block_of(count, vocab, call.logits, x)
    dx, dweight, dbias = gradients(dlogits, x, weight, bias, count, shape, needs_grad, exact, wide)
    return None if dx is None else tokens.whole(dx.to(x.dtype)), dweight, dbias


def gradients(
    dlogits: Callable[[Columns, int, int], tuple[Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    shape: Span,
    needs_grad: tuple[bool, ...],
    exact: bool,
    wide: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the results of `cross_entropy_bwd` for `count` tokens, but dx in at least float32.

    `dlogits(columns, lo, hi)` returns tokens lo to hi, and the gradient of their logits; `shape`
    is that of blocks.
    """
    vocab, dtype, (rows, columns) = len(weight), torch.promote_types(x.dtype, torch.float32), shape
    dx = x.new_empty((count, x.shape[1]), dtype=dtype) if needs_grad[0] else None
    wide_dweight = torch.promote_types(weight.dtype, torch.float32) if exact else weight.dtype
    dweight = x.new_empty(weight.shape, dtype=wide_dweight) if needs_grad[1] else None
    dbias = x.new_zeros(vocab, dtype=dtype) if needs_grad[2] else None
    for span in spans(vocab, columns):
        block = Columns.of(weight, bias, span, x, wide)
        mine = None if dweight is None else dweight[slice(*span)]
        dw = None if mine is None else sum_in(mine, block.weight.dtype, -(-count // rows))
        for lo, hi in spans(count, rows):
            x_part, z = dlogits(block, lo, hi)
            if dbias is not None:
                dbias[slice(*span)] += z.sum(0, dtype=dtype)
            z = z.to(block.weight.dtype)
            if dw is not None:
                add_product(dw, z.t(), x_part, lo == 0)
            if dx is not None:
                add_product(dx[lo:hi], z, block.weight, span[0] == 0)
            del x_part, z
        if mine is not None and dw is not None and dw is not mine:
            mine.copy_(dw)
    return dx, dweight, dbias


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Node):
    """name = the loss of each token whose logits are x @ weight.T + bias, and `outputs`.

    Backward computes the logits again, a block at a time, from x and two statistics: their maximum
    and log(sum(exp(logits - maximum))); with the entropy, from it as well. The operation forms the
    blocks, over all tokens.
    """

    x: Input
    # weight, bias, target: names of the params; `target` holds a column for each token
    weight: Param
    bias: Param
    target: Param
    # ignore_index, label_smoothing, z_loss, softcap, logits, logit_scale, outputs: as in
    # `CrossEntropyTargets`; outputs other than the entropy have no gradient
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logits: int = 0
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = ()
    # the ranks among which the vocabulary is divided evenly; None for one rank
    parallel: ParallelSpec | None = None
    per_batch: bool = True
    widens: ClassVar[bool] = True

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        names = ("max", "log_sum", *(["entropy"] if "entropy" in self.outputs else []))
        return tuple([f"{self.name}.{name}" for name in names])

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return 1 + len(self.outputs)

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return 2 * shapes[self.weight][0] * shapes[self.weight][1]

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.stats)

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.params

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        weight, bias = chunk.param(self.weight), chunk.param(self.bias)
        assert weight is not None
        made = chunk.ops[cross_entropy_fwd](chunk[self.x], weight, bias, self.call(chunk), out)
        for name, value in zip(self.makes, made, strict=True):
            chunk.put(name, value)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        x, weight, bias = chunk[self.x], chunk.param(self.weight), chunk.param(self.bias)
        assert weight is not None
        stats = tuple([chunk[name] for name in self.stats])
        marks = self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad
        dx, dweight, dbias = chunk.ops[cross_entropy_bwd](
            dy, x, weight, bias, stats, self.call(chunk), marks, chunk.owner.exact
        )
        if dx is not None:
            if self.parallel is not None:
                dx = collective.total(dx, self.parallel.group, owned=True)
            chunk.add_grad(self.x, dx, owned=True)
        if dweight is not None:
            chunk.add_param_grad(self.weight, dweight)
        if dbias is not None:
            chunk.add_param_grad(self.bias, dbias)

    def call(self, chunk: Chunk) -> CrossEntropyTargets:
        """Return the call for the chunk's tokens, of this rank's columns."""
        target, weight = chunk.param(self.target), chunk.param(self.weight)
        assert target is not None and weight is not None
        return self.targets(target.reshape(-1)[chunk.token0 : chunk.token0 + chunk.rows], weight)

    def targets(self, target: Tensor, weight: Tensor) -> CrossEntropyTargets:
        """Return the call for tokens with these targets, of this rank's columns `weight`."""
        options = self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.logits
        more, parallel = ("", 0, self.logit_scale, self.outputs), self.parallel
        call = CrossEntropyTargets(target, *options, *more)
        if parallel is None:
            return call
        count = weight.shape[0]
        at = call.target - parallel.rank * count
        at = at.masked_fill((at < 0) | (at >= count), -1)
        return replace(
            call,
            target=at.masked_fill(call.target == call.ignore_index, -2),
            ignore_index=-2,
            group=parallel.group,
            classes=count * parallel.size,
        )


def check_targets(call: CrossEntropyTargets, vocab: int) -> None:
    """Check that every target is a column.

    Raises: IndexError; on a device, which is not waited for, the device asserts instead.
    """
    target = call.target
    if call.group:  # checked by who divided the columns
        return
    wrong = ((target < 0) | (target >= vocab)) & (target != call.ignore_index)
    if not is_read(target):
        torch._assert_async(
            ~wrong.any(), "fused_remat: a target of a cross-entropy is out of bounds"
        )
    elif bool(wrong.any()):
        raise IndexError(
            f"Target {int(target[wrong][0])} is out of bounds: the logits have {vocab} columns. "
            f"Pass {call.ignore_index} (ignore_index) for a token that does not count"
        )


@dataclass(frozen=True, eq=False)
class Tokens:
    """The n tokens that are processed: those that count, if reading the targets needs no wait."""

    x: Tensor  # (T, D), of all tokens
    rows: Tensor | None  # the numbers of the processed tokens; None for all tokens
    target: Tensor  # their targets
    used: Tensor | None  # (n, 1), which of them count; None if all do

    @classmethod
    def of(cls, x: Tensor, call: CrossEntropyTargets) -> Tokens:
        used = call.target != call.ignore_index
        if not is_read(call.target):
            return cls(x, None, call.target, used[:, None])
        if bool(used.all()):
            return cls(x, None, call.target, None)
        rows = used.nonzero()[:, 0]
        return cls(x, rows, call.target[rows], None)

    def taken(self, t: Tensor, lo: int, hi: int) -> Tensor:
        """Return rows `lo` to `hi` of the processed tokens' rows of `t`."""
        return t[lo:hi] if self.rows is None else t[self.rows[lo:hi]]

    def whole(self, t: Tensor) -> Tensor:
        """Return `t` for all T tokens, with zeros for those that do not count."""
        if self.used is not None:
            return t.masked_fill_(~self.used, 0)
        if self.rows is None:
            return t
        return t.new_zeros((len(self.x), t.shape[1])).index_copy_(0, self.rows, t)


@dataclass(frozen=True, eq=False)
class Columns:
    """A block of columns: its weights in the dtype of products, and the number of the first."""

    weight: Tensor
    bias: Tensor | None
    first: int

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, span: Span, x: Tensor, wide: bool = False
    ) -> Columns:
        """Round to the dtype of `x`; then, if `wide`, convert to float32."""
        parts = [None if t is None else t[slice(*span)].to(x.dtype) for t in (weight, bias)]
        if wide:
            parts = [None if t is None else t.float() for t in parts]
        assert parts[0] is not None
        return cls(parts[0], parts[1], span[0])

    def logits(self, x: Tensor, call: CrossEntropyTargets) -> Tensor:
        """Return the logits of the tokens `x`, in at least float32."""
        scale, softcap = call.logit_scale, call.softcap
        z = product(x.to(self.weight.dtype), self.weight.t())
        if self.bias is not None:
            z.add_(self.bias)
        if softcap:
            return z.mul_(scale / softcap).tanh_().mul_(softcap)
        return z if scale == 1.0 else z.mul_(scale)

    def places(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' columns within the block, (n, 1), and whether they are in it."""
        at = (target - self.first)[:, None]
        inside = (at >= 0) & (at < len(self.weight))
        return at.clamp_(0, len(self.weight) - 1), inside


def sum_in(dweight: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """Return the tensor in which `terms` products of operands in `dtype` are summed.

    That is `dweight` itself unless the sum would be rounded to 16 bits term by term.
    """
    alone = terms <= 1 and dweight.dtype == dtype
    if alone or dweight.dtype.itemsize > 2:
        return dweight.zero_() if terms == 0 else dweight
    new = torch.empty if terms else torch.zeros
    return new(dweight.shape, dtype=torch.float32, device=dweight.device)
