"""Every kernel in every configuration it can launch with: launches over tensors without data.

The launches are those that `fused_remat.triton` makes, from meta tensors, so that what is
audited is what runs. A case is "default" if ordinary tensors lead to it: aligned, of even sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.audit.attention import Case, attention_cases, meta
from fused_remat.kernels.pointwise import Sequences
from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.random import NUM_SITES, DropoutMask
from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.norm import NORMS
from fused_remat.steps.rotary import RotaryTables
from fused_remat.steps.stacks import Into
from fused_remat.triton import cross_entropy, experts, pointwise, products, rotary, tables
from fused_remat.triton import norm as norms
from fused_remat.triton.launch import Launch, Target
from fused_remat.triton.operands import cdiv
from fused_remat.triton.tables import Tile

#: Tokens; the width of a matrix that is passed over once; those of an MLP; rows of rotary tables.
ROWS, WIDTH, PRODUCT, TABLE = 8192, 4096, (2048, 8192), 2048
#: Widths of an MLP that are not multiples of any step along K, with unaligned rows.
UNEVEN = (1000, 4001)
#: Tokens, width, hidden units, experts and those of a token: of Qwen3-30B-A3B and gpt-oss-20b. The
#: lists of tiles have no multiple of 16 of them, as those of a test's few rows.
MIXTURES = {
    "swiglu": (4104, 2048, 768, 128, 8),
    "swiglu transposed": (4104, 2048, 768, 128, 8),
    "clamped": (4104, 2880, 2880, 32, 4),
    "swiglu uneven": (4104, 1000, 1001, 32, 4),
    "clamped uneven": (4104, 1000, 1001, 32, 4),
}
FP32 = torch.float32
_ACTS = tuple(pointwise.PAIRS)
#: Names and launches of cases that ordinary tensors lead to, without matrix products.
Named = Iterator[tuple[str, Launch]]

#: Multiprocessors of a typical GPU of each architecture; 0 stands for gfx942.
SMS = {
    80: 108, 86: 84, 87: 16, 89: 128, 90: 132, 100: 148, 103: 148, 120: 188, 121: 48, 0: 304,
}  # fmt: skip


def target(arch: int) -> Target:
    """Return the target of an architecture, e.g. 90; 0 for gfx942."""
    return Target("cuda" if arch else "hip", arch, SMS[arch])


def _keep(width: int) -> DropoutMask:
    key = torch.empty((), dtype=torch.int64, device="meta")
    return DropoutMask(key, 0, ROWS, width, 0.1, torch.float32)


def tile_name(tile: Tile) -> str:
    """Return a tile's sizes, in how many parts it ends, warps and stages.

    >>> tile_name(Tile(128, 256, 64, 8, 3, parts=4))
    '128x256/4x64 w8 s3'
    """
    parts = f"/{tile.parts}" if tile.parts > 1 else ""
    return f"{tile.block_m}x{tile.block_n}{parts}x{tile.block_k} w{tile.warps} s{tile.stages}"


def _norm_launches(
    spec: NormSpec, x: Tensor, low: Tensor, affine: Tensor, bias: Tensor | None, at: Target,
    sequences: Sequences | None = None,
) -> Iterator[tuple[str, str, Launch]]:  # fmt: skip
    """Yield each kernel, its fusion and its launch: of a stream `x` to results like `low`."""
    width, stats = x.shape[1], tuple(meta(FP32, ROWS, 1) for _ in NORMS[spec.kind].stats)
    total, y = meta(x.dtype, *x.shape), meta(low.dtype, *x.shape)
    plain = spec, x, None, None, affine, bias, None, y, stats
    yield "norm_fwd", "", norms.norm_fwd(*plain, False, sequences)
    yield "norm_rebuild", "", norms.norm_fwd(*plain, True, sequences)
    if width <= norms.FWD_WIDTH and sequences is None:
        fused = spec, low, x, _keep(width), affine, bias, total, y, stats, False
        yield "norm_fwd", " dropout residual", norms.norm_fwd(*fused)
    count = affine.numel()
    grads = meta(FP32, count), None if bias is None else meta(FP32, count)
    for launch in norms.norm_bwd(spec, low, x, stats, affine, x, total, *grads, at, sequences):
        yield launch.kernel.fn.__name__.removesuffix("_kernel"), "", launch


def norm_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield forward, with and without its fused sum, rebuild, backward; narrow and wide rows."""
    for width in (512, 576, 1024, 1536, 2048, 4096, 8192, 16384, 65536):
        x, affine = meta(dtype, ROWS, width), meta(dtype, width)
        for kind in NORMS:
            found = _norm_launches(NormSpec(kind=kind), x, x, affine, affine, at)
            for kernel, fused, launch in found:
                if kernel != "column_sum" or kind == "rms_norm":
                    yield f"{kernel} {kind} {width}{fused}", launch


def pointwise_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield one pass over a matrix each, with dropout; every activation."""
    x, y, z = (meta(dtype, ROWS, WIDTH) for _ in range(3))
    keep = _keep(WIDTH)
    seed, keys = meta(torch.int64), meta(torch.int64, NUM_SITES)
    yield "site_keys_fwd", pointwise.site_keys(seed, 0, keys)
    yield "dropout_add_fwd", pointwise.dropout_add_fwd(x, y, None, z)
    yield "dropout_add_fwd dropout", pointwise.dropout_add_fwd(x, y, keep, z)
    yield "dropout_bwd", pointwise.dropout_add_fwd(x, None, keep, z)
    total = meta(FP32, WIDTH)
    yield "dropout_sum_bwd", pointwise.act_sum_bwd(x, None, None, keep, z, total)[0]
    for act in _ACTS:
        yield f"act_fwd {act} dropout", pointwise.act_fwd(x, act, keep, z)
        yield f"act_bwd {act} dropout", pointwise.act_bwd(x, y, act, keep, z)
        if act == "gelu":
            yield f"act_sum_bwd {act}", pointwise.act_sum_bwd(x, y, act, None, x, total, y)[0]
            given = x, y, act, keep, x, total
            yield f"act_sum_bwd {act} dropout", pointwise.act_sum_bwd(*given)[0]
        yield f"act_bwd {act} dropout y", pointwise.act_bwd(x, y, act, keep, x, y)
        yield f"gated_fwd {act} dropout", pointwise.gated_fwd(x, y, act, keep, z)
        yield f"gated_bwd {act} dropout", pointwise.gated_bwd(x, y, z, act, keep, x, z)
        yield f"gated_bwd {act} dropout y", pointwise.gated_bwd(x, y, z, act, keep, y, x, z)


def loss_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield the pass that makes the gradient of logits, for tiles of each width."""
    held, labels = meta(dtype, ROWS, WIDTH), meta(torch.int64, ROWS)
    one = [meta(FP32, ROWS) for _ in range(5)]
    for block_n in (64, 128, 256):
        highs = meta(FP32, cdiv(WIDTH, block_n), ROWS)
        for name, softcap in (("plain", 0.0), ("softcap smoothing", 30.0)):
            slopes = one[2], one[3] if softcap else None, one[4]
            given = held, labels, softcap, highs, (one[0], one[1]), slopes, block_n
            yield f"cross_entropy_grad {name} {block_n}", cross_entropy.cross_entropy_grad(*given)


def mixed_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield cases of autocast to `dtype`: norms, sums, dropout's backward of a float32 stream."""
    for width in (1024, 8192, 16384, 65536):
        x, y, z = (meta(FP32, ROWS, width) for _ in range(3))
        low, affine = meta(dtype, ROWS, width), meta(FP32, width)
        for kernel, fused, launch in _norm_launches(NormSpec(), x, low, affine, affine, at):
            if kernel not in ("norm_rebuild", "column_sum"):
                yield f"{kernel} mixed {width}{fused and f' mixed{fused}'}", launch
        if width <= norms.FWD_WIDTH:
            stats = meta(FP32, ROWS, 1), meta(FP32, ROWS, 1)
            given = NormSpec(), low, x, _keep(width), affine, affine, y, z, stats, False
            yield f"norm_fwd float32 {width} mixed dropout residual", norms.norm_fwd(*given)
    x, y, low = (meta(of, ROWS, WIDTH) for of in (FP32, FP32, dtype))
    keep = _keep(WIDTH)
    yield "dropout_add_fwd mixed", pointwise.dropout_add_fwd(low, x, None, y)
    yield "dropout_add_fwd mixed dropout", pointwise.dropout_add_fwd(low, x, keep, y)
    yield "dropout_bwd mixed", pointwise.dropout_add_fwd(x, None, keep, low)


def shifted_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield float32 weights with activations of `dtype`: norms with an offset, norms of heads."""
    x, spec = meta(dtype, ROWS, 4096), NormSpec(kind="rms_norm")
    for kernel, fused, launch in _norm_launches(spec, x, x, meta(FP32, 4096), None, at):
        if kernel in ("norm_fwd", "norm_bwd"):
            yield f"{kernel} rms_norm 4096 shifted{fused}", launch
    for name, launch in _rotary_cases("norm half", at, dtype, FP32):
        if not name.endswith("in place"):
            yield f"{name} shifted", launch


def modulated_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield norms and gates by a condition of each sequence or token, in float32."""
    sequences = Sequences(0, ROWS // 4, 4)
    for kind, width in (
        ("layer_norm", 1152), ("rms_norm", 2304), ("layer_norm", 3072), ("rms_norm", 4096),
        ("layer_norm", 5120), ("layer_norm", 65536),
    ):  # fmt: skip
        x, (weight, bias) = meta(dtype, ROWS, width), (meta(FP32, 4, width) for _ in "wb")
        found = _norm_launches(NormSpec(kind=kind), x, x, weight, bias, at, sequences)
        for kernel, _, launch in found:
            if kernel != "column_sum":
                yield f"{kernel}_modulated {kind} {width}", launch
    tokens, x, affine = Sequences(0, 1, ROWS), meta(dtype, ROWS, 3072), meta(FP32, ROWS, 3072)
    for kernel, _, launch in _norm_launches(NormSpec(), x, x, affine, affine, at, tokens):
        yield f"{kernel}_modulated layer_norm 3072 by token", launch
    x, y, z = (meta(dtype, ROWS, WIDTH) for _ in range(3))
    gate, sums = meta(FP32, 4, WIDTH), meta(FP32, 4 * WIDTH)
    yield "gate_add_fwd", pointwise.gate_add_fwd(x, y, gate, sequences, z)
    yield "gate_add_fwd alone", pointwise.gate_add_fwd(x, None, gate, sequences, z)
    yield "gate_add_bwd", pointwise.gate_add_bwd(x, y, gate, sequences, z, sums)[0]
    yield "gate_add_bwd sums", pointwise.gate_add_bwd(x, y, None, sequences, None, sums)[0]


#: name -> query and key heads, width of a head, elements rotated, adjacent pairs, norms.
ROTARY = {
    "half": (32, 8, 128, 128, False, False),
    "interleaved": (16, 16, 128, 128, True, False),
    "partial": (32, 32, 96, 32, False, False),
    "interleaved partial": (16, 1, 256, 64, True, False),
    "norm half": (32, 8, 128, 128, False, True),
    "norm interleaved": (12, 12, 64, 64, True, True),
    "norm partial": (16, 2, 256, 64, False, True),
    "norm alone": (16, 16, 64, 0, False, True),
}


def rotary_cases(at: Target, dtype: torch.dtype) -> Named:
    """Yield rotations of heads there and back, in place and not, float32 tables; with norms."""
    for name in ROTARY:
        yield from _rotary_cases(name, at, dtype, dtype)


def _rotary_cases(name: str, at: Target, dtype: torch.dtype, norm_dtype: torch.dtype) -> Named:
    nhead, kv_heads, width, rotated, interleaved, norm = ROTARY[name]
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=width, scale=1.0,
        rotary=RotarySpec(interleaved=interleaved) if rotated else None,
        head_norm=NormSpec(kind="rms_norm", eps=1e-6) if norm else None,
    )  # fmt: skip
    x, y, z = (meta(dtype, ROWS, (nhead + 2 * kv_heads) * width) for _ in range(3))
    cos, sin = (meta(FP32, TABLE, rotated // 2) if rotated else None for _ in "cs")
    weights = [meta(norm_dtype, width) if norm else None for _ in "qk"]
    call = RotaryTables(spec, cos, sin, *weights, 0, TABLE)
    yield f"rotary_fwd {name}", rotary.rotary_fwd(x, call, y, at)
    yield f"rotary_fwd {name} in place", rotary.rotary_fwd(x, call, x, at)
    batch, count = cdiv(ROWS, TABLE), nhead + 2 * kv_heads  # of whole sequences
    rows = meta(dtype, batch, TABLE, count, width).transpose(1, 2)
    heads = rows.split((nhead, kv_heads, kv_heads), 1)
    u, v = (meta(dtype, batch * TABLE, count * width) for _ in range(2))
    if not norm:
        yield f"rotary_bwd {name}", rotary.rotary_fwd(x, call, x, at, True)
        yield f"rotary_pack_bwd {name}", rotary.pack_heads(heads, call, v, None)[0]
        if name == "half":
            totals, plain = meta(FP32, x.shape[1]), replace(call, cos=None, sin=None)
            for suffix, tables in ((" sums", call), (" sums alone", plain)):
                launch, _ = rotary.pack_heads(heads, tables, v, totals)
                yield f"rotary_pack_bwd {name}{suffix}", launch
        return
    sums = (meta(FP32, width), meta(FP32, width))
    for suffix, dy, kept, dx, given in (
        ("", y, x, z, None), (" in place", y, x, y, None), (" heads", v, u, v, heads),
    ):  # fmt: skip
        launch, *_ = rotary.rotary_norm_bwd(dy, kept, call, dx, *sums, at, given)
        yield f"rotary_norm_bwd {name}{suffix}", launch


class Products:
    """Operands of products, by default those of the audit, and the launches over them with a tile.

    `launches(kernel, tile)`: of a kernel of `tables.TILES`, by what fuses with it.
    """

    def __init__(
        self, at: Target, dtype: torch.dtype, sizes: tuple[int, ...] = (),
        draw: Callable[..., Tensor] = meta,
    ) -> None:  # fmt: skip
        rows, d, f = sizes or (ROWS, *PRODUCT)
        self.at, self.keep, self.draw = at, _keep(f), draw
        self.x, self.dy = (draw(dtype, rows, d) for _ in range(2))
        self.y, self.pre, self.other = (draw(dtype, rows, f) for _ in range(3))
        self.up, self.down = draw(dtype, f, d), draw(dtype, d, f)
        self.bias = draw(dtype, f)
        self.labels = draw(torch.int64, rows)
        self.columns = [draw(FP32, rows) for _ in range(5)]
        self.dropped = {f"{act} dropout": (self.keep, act) for act in _ACTS}

    @property
    def results(self) -> dict[str, Tensor]:
        """Tensors that launches may write."""
        return {"y": self.y, "pre": self.pre, "other": self.other, "picked": self.columns[0]}

    def launches(self, kernel: str, tile: Tile) -> dict[str, Launch]:
        if kernel.startswith("cross_entropy"):
            return self._loss(kernel, tile)
        if kernel.endswith("bwd"):
            return self._backward(kernel, tile)
        return self._linear(tile) if kernel == "linear" else self._gated(tile)

    def _linear(self, tile: Tile) -> dict[str, Launch]:
        def one(*end: Any) -> Launch:
            """Return a launch; `end` is dropout, activation, pre."""
            given = self.x, self.up, self.bias, *end, self.y, self.at, tile
            return products.linear_fwd(*given)

        dropped = {f"{name} pre": one(*end, self.pre) for name, end in self.dropped.items()}
        return {"act": one(None, "gelu", None), **dropped}

    def _gated(self, tile: Tile) -> dict[str, Launch]:
        """Yield cases by dropout, activation, and what is kept of gate and up, as it is or not."""
        layer, nothing = (self.up, self.bias), (None, None)

        def one(keep: Any, act: str, pres: Any = nothing) -> Launch:
            given = self.x, *layer, *layer, keep, act, self.y, self.at, tile, pres
            return products.gated_mlp_fwd(*given)

        return {
            "silu": one(None, "silu"),
            **{name: one(*end) for name, end in self.dropped.items()},
            "silu dropout pre": one(self.keep, "silu", (self.pre, self.other)),
        }

    def _backward(self, kernel: str, tile: Tile) -> dict[str, Launch]:
        """Yield every activation with dropout, and one without; act is written over up."""
        gated = kernel.startswith("gated")
        act = "silu" if gated else "gelu"
        given = self.x, ((self.up, self.bias),) * (1 + gated), self.dy, self.down
        made = self.y, (self.pre, self.other) if gated else (self.pre,), self.at, tile
        ends = {act: (None, act), **self.dropped}
        return {name: products.mlp_bwd(*given, *end, *made) for name, end in ends.items()}

    def _loss(self, kernel: str, tile: Tile) -> dict[str, Launch]:
        """Return the loss of a head as wide as the MLP: plain, and with all options."""
        blocks = cdiv(len(self.up), tile.block_n)
        rows = [self.draw(FP32, blocks, len(self.x)) for _ in range(3)]
        found = {}
        for name, bias, softcap, scale in (
            ("plain", None, 0.0, 1.0),
            ("bias softcap smoothing", self.bias, 30.0, 0.5),
        ):
            given = self.x, self.up, bias, self.labels, softcap
            if kernel != "cross_entropy_bwd":
                made = 0, *rows[:2], rows[2] if softcap else None, self.columns[0], self.at, tile
                exps = self.y if kernel == "cross_entropy_exps" else None
                found[name] = cross_entropy.cross_entropy_fwd(*given, *made, exps, scale)
            else:
                *stats, mass, spread, at_target = self.columns
                slopes = mass, spread if softcap else None, at_target
                made = 8192, tuple(stats), slopes, self.y, self.at, tile
                found[name] = cross_entropy.cross_entropy_bwd(*given, *made, scale)
        return found


def gemm_cases(at: Target, dtype: torch.dtype) -> Iterator[Case]:
    """Yield products: every tile of the tables, even and uneven sizes, every end."""
    for even, widths in ((True, PRODUCT), (False, UNEVEN)):
        products = Products(at, dtype, (ROWS, *widths))
        for kernel, by_family in tables.TILES.items():
            for tile in by_family.get(tables.family(at), ()):
                for name, launch in products.launches(kernel, tile).items():
                    case = f"{kernel} {name} {tile_name(tile)}{'' if even else ' uneven'}"
                    yield Case(case, launch, even, True)


class Experts:
    """Operands of experts' kernels, and the launches over them with a tile, as `Products`."""

    def __init__(self, at: Target, dtype: torch.dtype, kind: str) -> None:
        self.at, self.kind = at, kind
        self.tokens, d, f, count, top_k = MIXTURES[kind]
        clamped = kind.startswith("clamped")
        options = {"activation": CLAMPED, "interleaved": True, "limit": 7.0, "alpha": 1.702}
        self.spec = ExpertsSpec(
            experts=count, top_k=top_k, transposed=clamped or "transposed" in kind,
            **(options if clamped else {}),
        )  # fmt: skip
        pairs = self.tokens * top_k
        self.x, self.dy = (meta(dtype, self.tokens, d) for _ in range(2))
        self.weights, self.dweights = (meta(FP32, self.tokens, top_k) for _ in range(2))
        self.pre, self.dpre = (meta(dtype, pairs, 2 * f) for _ in range(2))
        self.act, self.y = meta(dtype, pairs, f), meta(dtype, pairs, d)
        swap = slice(None, None, -1 if self.spec.transposed else 1)
        self.up, self.down = (
            meta(dtype, count, *(2 * f, d)[swap]),
            meta(dtype, count, *(d, f)[swap]),
        )
        self.up_bias = meta(dtype, count, 2 * f) if clamped else None
        self.down_bias = meta(dtype, count, d) if clamped else None

    def rows(self, block_m: int) -> experts.Rows:
        count, top_k = self.spec.experts, self.spec.top_k
        tiles = meta(torch.int32, cdiv(self.tokens * top_k, block_m) + count, 2)
        pairs, ends = meta(torch.int64, self.tokens * top_k), meta(torch.int32, count)
        return experts.Rows(pairs, ends, tiles, block_m, top_k)

    def launches(self, kernel: str, tile: Tile) -> dict[str, Launch]:
        """Return launches of a kernel of `tables.EXPERTS_TILES`, by what is computed."""
        if kernel == "experts_dw":
            return self._gradients(tile)
        if kernel == "experts_act_bwd":
            return {self.kind: self._act_bwd(tile)[0]}
        rows, is_kn, end = self.rows(tile.block_m), self.spec.transposed, (self.at, tile)
        if kernel == "experts_up_act":
            given = self.x, self.up, self.up_bias, self.weights, rows, self.act, is_kn, *end
            return {self.kind: experts.experts_up_act(self.spec, *given)}
        up = self.x, self.up, self.up_bias, None, rows, self.pre, is_kn, "gather"
        down = self.act, self.down, self.down_bias, self.weights, rows, self.y, is_kn, "scatter"
        dx = self.pre, self.up, None, None, rows, self.y, not is_kn, "scatter"
        return {
            f"{self.kind} {name}": experts.experts_product(*given, *end)
            for name, given in {"up": up, "down": down, "dx": dx}.items()
        }

    def _act_bwd(self, tile: Tile) -> list[Launch]:
        given = self.dy, self.down, self.down_bias, self.pre, self.weights, self.rows(tile.block_m)
        results, is_kn = (self.dpre, self.act, self.dweights), not self.spec.transposed
        return experts.experts_act_bwd(self.spec, *given, *results, is_kn, self.at, tile)

    def _gradients(self, tile: Tile) -> dict[str, Launch]:
        """Return gradients in the dtype of the stack, and added in float32."""
        up = Into(meta(self.x.dtype, *self.up.shape), fresh=True)
        down = Into(meta(FP32, *self.down.shape), fresh=False)
        found, rows = {}, self.rows(tile.block_m)
        for name, grad, pair, by_token in (
            ("up", up, (self.pre, self.x), (False, True)),
            ("down added", down, (self.dy, self.act), (True, False)),
        ):
            swap = slice(None, None, -1 if self.spec.transposed else 1)
            given = *pair[swap], rows, grad, by_token[swap]
            found[f"{self.kind} {name}"] = experts.experts_dw(*given, self.at, tile)
        return found

    def passes(self) -> Named:
        """Yield launches without products, by the rows of a tile where they depend on these."""
        for tile in tables.EXPERTS_TILES["experts_act_bwd"][tables.family(self.at)]:
            rows, tiled = self.rows(tile.block_m), f"{self.kind} {tile.block_m}"
            given = rows.ends, rows.tiles, len(rows.pairs), rows.block_m
            yield f"experts_tiles_fwd {tiled}", experts.experts_tiles(*given)
            yield f"experts_weights_bwd {tiled}", self._act_bwd(tile)[1]
        acted = self.spec, self.pre, self.weights, rows, self.act
        yield f"experts_act_fwd {self.kind}", experts.experts_act_fwd(*acted)
        c, d = self.pre.shape[1], self.x.shape[1]
        for name, *given, width, by_token in (
            ("up", self.pre, None, c, False), ("down", self.dy, self.weights, d, True),
        ):  # fmt: skip
            into = Into(meta(FP32, self.spec.experts, width), fresh=True)
            launch = experts.experts_bias_bwd(*given, rows, into, by_token)
            yield f"experts_bias_bwd {self.kind} {name}", launch


def experts_cases(at: Target, dtype: torch.dtype) -> Iterator[Case]:
    """Yield products with every tile of the tables, and passes over even sizes."""
    for kind in MIXTURES:
        made, even = Experts(at, dtype, kind), "uneven" not in kind
        for kernel, by_family in tables.EXPERTS_TILES.items():
            for tile in by_family[tables.family(at)]:
                for name, launch in made.launches(kernel, tile).items():
                    yield Case(f"{kernel} {name} {tile_name(tile)}", launch, even, True)
        if even and "transposed" not in kind:
            yield from (Case(name, launch, True, False) for name, launch in made.passes())


def cases(at: Target, dtype: torch.dtype) -> Iterator[Case]:
    """Yield all cases of a target and dtype; products in float32 are ATen's and not among them."""
    makers = [norm_cases, pointwise_cases, modulated_cases, rotary_cases]
    makers += [loss_cases, mixed_cases, shifted_cases] if dtype.itemsize == 2 else []
    for make in makers:
        yield from (Case(name, launch, True, False) for name, launch in make(at, dtype))
    if dtype.itemsize == 2:
        yield from gemm_cases(at, dtype)
        yield from experts_cases(at, dtype)
        yield from attention_cases(at, dtype)
