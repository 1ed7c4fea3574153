"""Tables of the tiles that kernels take, and of what runs in a kernel rather than in ATen.

Nothing is tuned at run time: to tune, change an entry. Tiles are the largest that compile without
spills (`python -m bench audit`), and what runs where follows from counted bytes and operations
(`docs/kernels.md`). Of the hardware, one H100 has compared tiles and routes of Hopper: a comment
that begins with a result's name, such as 9bb90cd, quotes `bench/results/2026-11-27-h100-9bb90cd`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fused_remat.steps import attention_aten
from fused_remat.steps.attention_call import AttentionArgs, AttentionKey, flash_is_replaced
from fused_remat.triton.launch import Target
from fused_remat.triton.operands import cdiv


@dataclass(frozen=True)
class Tile:
    """The division of a product: a tile of the output, and the step along K."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int  # of the pipeline
    parts: int = 1  # in which the tile's end is computed, to need fewer registers
    group: int = 8  # rows of tiles that are visited together


#: GPUs by what limits a tile: shared memory of a multiprocessor, and matrix instructions.
FAMILIES = {
    80: "ampere", 86: "small", 87: "ampere", 89: "small", 90: "hopper", 100: "blackwell",
    103: "blackwell", 120: "small", 121: "small",
}  # fmt: skip


def family(target: Target) -> str:
    """Return a target's row in the tables; an unknown GPU takes the smallest tiles."""
    return FAMILIES.get(target.arch, "small") if target.kind == "cuda" else target.kind


_INTERPRETED = (Tile(32, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1, parts=2, group=2))
# The other families' tiles of most kernels.
_OTHERS = {
    "ampere": (Tile(128, 128, 32, 8, 4, parts=4), Tile(64, 128, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    "small": (Tile(128, 128, 32, 8, 3, parts=2), Tile(64, 64, 32, 4, 3)),
    "hip": (Tile(128, 128, 32, 8, 2), Tile(64, 64, 32, 4, 2)),
    "interpreter": _INTERPRETED,
}
#: Kernel -> family -> tiles, the largest first, for operands of 16 bits; a family has no entry
#: where another route computes the same.
TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "linear": {
        "blackwell": (
            Tile(128, 256, 64, 8, 3, parts=8),
            Tile(128, 128, 64, 8, 4),
            Tile(64, 64, 64, 4, 4, parts=2),
        ),
        **_OTHERS,
    },
    "gated_mlp_fwd": {
        "hopper": (Tile(128, 128, 64, 8, 3, parts=2), Tile(64, 64, 64, 4, 4)),
        "blackwell": (Tile(128, 128, 64, 8, 3, parts=4), Tile(64, 64, 64, 4, 4)),
        "ampere": (Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 4)),
        "small": (Tile(128, 64, 32, 8, 3), Tile(64, 64, 32, 4, 3)),
        "hip": (Tile(64, 64, 32, 4, 2),),
        "interpreter": _INTERPRETED,
    },
    "mlp_bwd": {
        "ampere": (Tile(128, 128, 32, 8, 4, parts=8), Tile(64, 64, 32, 4, 4, parts=2)),
        "small": (Tile(128, 64, 32, 8, 3, parts=2), Tile(64, 64, 32, 4, 3, parts=2)),
        "hip": (Tile(128, 128, 32, 8, 2, parts=4), Tile(64, 64, 32, 4, 2, parts=2)),
        "interpreter": _INTERPRETED,
    },
    "gated_mlp_bwd": {
        "ampere": (Tile(128, 64, 32, 8, 3, parts=2), Tile(64, 64, 32, 4, 3, parts=4)),
        "small": (Tile(128, 64, 32, 8, 2, parts=2), Tile(64, 64, 32, 4, 2, parts=4)),
        "hip": (Tile(64, 64, 32, 4, 1),),
        "interpreter": _INTERPRETED,
    },
    "cross_entropy_fwd": {
        # 9bb90cd, "tiles of cross_entropy_fwd": 460, 512 and 605 us, in this order.
        "hopper": (
            Tile(128, 256, 64, 8, 3, parts=8),
            Tile(128, 128, 64, 8, 4),
            Tile(64, 128, 64, 4, 4),
        ),
        "blackwell": (
            Tile(128, 256, 64, 8, 3, parts=4),
            Tile(128, 128, 64, 8, 4),
            Tile(64, 64, 64, 4, 4),
        ),
        **_OTHERS,
    },
    # Forward where it writes exponentials. On Blackwell Triton 3.7 fails to compile it; ATen runs.
    "cross_entropy_exps": {
        "hopper": (Tile(128, 128, 64, 8, 4, parts=2), Tile(64, 128, 64, 4, 4)),
        **_OTHERS,
    },
    "cross_entropy_bwd": {
        # 9bb90cd, "tiles of cross_entropy_bwd": 464, 537 and 561 us, in this order.
        "hopper": (
            Tile(128, 256, 64, 8, 3, parts=4),
            Tile(128, 128, 64, 8, 4),
            Tile(64, 128, 64, 4, 4, parts=2),
        ),
        "blackwell": (
            Tile(128, 256, 64, 8, 3, parts=4),
            Tile(128, 128, 64, 8, 4, parts=2),
            Tile(64, 64, 64, 4, 4),
        ),
        **_OTHERS,
    },
}


#: Kernel of experts -> family -> tiles, the largest first; in a family, all but those of weight
#: gradients, whose tiles are of a matrix, have the same block_m. Not measured yet.
EXPERTS_TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "experts_product": {
        "hopper": (Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4)),
        "blackwell": (Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4)),
        "ampere": (Tile(128, 128, 32, 8, 4), Tile(64, 128, 32, 4, 4)),
        "small": (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 3)),
        "hip": (Tile(128, 128, 32, 8, 2), Tile(64, 64, 32, 4, 2)),
        "interpreter": (Tile(32, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1, group=2)),
    },
    "experts_up_act": {
        "hopper": (Tile(128, 128, 64, 8, 3, parts=2), Tile(64, 64, 64, 4, 4)),
        "blackwell": (Tile(128, 64, 64, 8, 3), Tile(64, 64, 64, 4, 4)),
        "ampere": (Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 4)),
        "small": (Tile(128, 64, 32, 8, 3, parts=2), Tile(64, 64, 32, 4, 3)),
        "hip": (Tile(128, 64, 32, 8, 2), Tile(64, 64, 32, 4, 2)),
        "interpreter": (Tile(32, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1, parts=2, group=2)),
    },
    "experts_act_bwd": {
        "hopper": (Tile(128, 128, 64, 8, 3, parts=4), Tile(64, 64, 64, 4, 4, parts=2)),
        "blackwell": (Tile(128, 128, 64, 8, 3, parts=4), Tile(64, 64, 64, 4, 4, parts=2)),
        "ampere": (Tile(128, 128, 32, 8, 4, parts=4), Tile(64, 64, 32, 4, 4)),
        "small": (Tile(128, 64, 32, 8, 3, parts=2), Tile(64, 64, 32, 4, 3)),
        "hip": (Tile(128, 128, 32, 8, 2, parts=4), Tile(64, 64, 32, 4, 2)),
        "interpreter": (Tile(32, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1, parts=2, group=2)),
    },
    "experts_dw": {
        "hopper": (Tile(128, 128, 64, 8, 4),),
        "blackwell": (Tile(128, 128, 64, 8, 3),),
        "ampere": (Tile(128, 128, 32, 8, 4),),
        "small": (Tile(128, 128, 32, 8, 3),),
        "hip": (Tile(128, 128, 32, 8, 2),),
        "interpreter": (Tile(32, 32, 16, 4, 1),),
    },
}


def experts_rows(target: Target, rows: int) -> int:
    """Return the rows of a tile, where experts have `rows` on average."""
    sizes = [tile.block_m for tile in EXPERTS_TILES["experts_product"][family(target)]]
    return next((size for size in sizes if size <= rows), sizes[-1])


def experts_tile(kernel: str, target: Target, block_m: int) -> Tile:
    """Return a kernel's tile of so many rows."""
    tiles = EXPERTS_TILES[kernel][family(target)]
    return next(tile for tile in tiles if tile.block_m == block_m)


#: What a row or column of operands costs, in elements of the tile. Operands of a tile of 128 x 128
#: then count as 2 times its elements, and a tile of 64 x 64 has 0.6 of its speed: on Hopper the
#: second-level cache alone would make it 0.5, on Ampere it stays at 0.7.
_OPERAND = 128


def tile_for(kernel: str, target: Target, rows: int, columns: int) -> Tile:
    """Return the tile whose tiles cost the multiprocessor that computes most of them the least."""

    def cost(tile: Tile) -> int:
        m, n = tile.block_m, tile.block_n
        return cdiv(cdiv(rows, m) * cdiv(columns, n), target.sms) * (m * n + _OPERAND * (m + n))

    return min(TILES[kernel][family(target)], key=cost)


#: Families where an MLP's backward computes both products of a tile in one kernel, and its forward
#: a product and the activation though the product is kept. Elsewhere ATen computes these products,
#: and one pass follows. 12c2171, "mlp_bwd gelu" at widths of 1024, 2048 and 4096: 293, 912 and
#: 3286 us against 415, 1420 and 5417 in one kernel; "gated_mlp_bwd silu": 436, 1366 and 5232
#: against 530, 1835 and 7581.
MLP_IN_KERNELS = frozenset({"ampere", "small", "hip", "interpreter"})
#: Family -> the widest input, without and with a gate, of which one kernel computes an MLP's first
#: products and the activation, where no product is kept; in other families of any width. 12c2171,
#: "linear + gelu" at 1024, 2048 and 4096: 159, 492 and 1852 us against 154, 458 and 1765 of ATen
#: and a pass; "gated_mlp_fwd silu": 256, 893 and 3450 against 272, 868 and 3454.
MLP_UP_IN_KERNEL = {"hopper": (0, 1024)}


def mlp_up_in_kernel(target: Target, width: int, gated: bool, kept: bool) -> bool:
    """Return whether one kernel computes the first products, `width` deep, and the activation."""
    of = family(target)
    if kept or of in MLP_IN_KERNELS:
        return of in MLP_IN_KERNELS
    return of not in MLP_UP_IN_KERNEL or width <= MLP_UP_IN_KERNEL[of][gated]


#: Family -> threads of a program in a norm's backward, of 16 elements each. 49b8b42, "norm_bwd
#: layer_norm" of 2**26 elements on Hopper: rows of 4096 in tiles of 4096 elements take 191 us, rows
#: of 1024 and 2048 in tiles of 2048 elements 346 and 294. In larger ones they are not measured.
NORM_BWD_THREADS = {"hopper": 256}


@dataclass(frozen=True)
class AttentionTile:
    """The division of attention: queries (M) and keys (N) of a tile."""

    block_m: int
    block_n: int
    warps: int
    stages: int  # of the pipeline
    split: bool = False  # dk and dv have a launch each
    tma: bool = True  # heads are read through tensor descriptors, which take more registers


#: Families whose attention kernels read through tensor descriptors. sm_120 has these too, but there
#: operands then pass through registers, which spill.
ATTENTION_BY_DESCRIPTORS = frozenset({"hopper", "blackwell", "interpreter"})
#: Families where PyTorch's fused attention kernels run where they apply, except as
#: `why_own_attention` decides.
ATTENTION_BY_ATEN = frozenset({"ampere", "small", "hopper", "blackwell", "hip"})


def why_own_attention(target: Target, key: AttentionKey) -> str | None:
    """Return why our kernels run and not PyTorch's; None if PyTorch's run."""
    if reason := attention_aten.unsupported_reason(key):
        return reason
    if family(target) not in ATTENTION_BY_ATEN:
        return "ATen's fused kernels are not used on this target"
    if key.lengths:
        return "keys beyond the key lengths are not read"
    name = attention_aten.kernel_of(key)
    if not name:
        return "query heads that share a key head need one launch"
    measured = family(target) == "hopper" and 64 < max(key.widths) <= 128
    if name == "flash" and measured and not flash_is_replaced():
        return "faster than PyTorch's flash kernel here"
    if key.limited:
        return "a mask is read as it is, and excluded blocks are skipped"
    return None


_A = AttentionTile
_FORWARD = {
    64: {0: _A(128, 64, 8, 2)},
    128: {0: _A(128, 64, 8, 2), 3: _A(32, 64, 8, 2)},
    256: {0: _A(64, 64, 8, 1), 3: _A(32, 64, 8, 1)},
}
_MASK_GRADIENT = {
    64: {0: _A(64, 32, 4, 2)},
    128: {0: _A(64, 64, 8, 2)},
    256: {0: _A(64, 32, 8, 2), 1: _A(64, 32, 8, 1), 3: _A(64, 32, 8, 2)},
}
#: Kernel -> family -> widest head -> from how many `burdens` of a call on -> tile. For operands of
#: 16 bits.
ATTENTION_TILES: dict[str, dict[str, dict[int, dict[int, AttentionTile]]]] = {
    "fwd": {
        "hopper": {
            64: {0: _A(128, 128, 8, 3), 3: _A(128, 64, 8, 2)},
            # 9bb90cd, "tiles of attention_fwd causal", without burdens: 584 us, 735 of the next.
            128: {
                0: _A(64, 64, 4, 3),
                1: _A(128, 128, 8, 2),
                2: _A(128, 64, 8, 2),
                3: _A(128, 32, 8, 2),
            },
            256: {0: _A(128, 64, 8, 2), 1: _A(128, 32, 8, 2), 3: _A(128, 16, 8, 2)},
        },
        "blackwell": {
            64: {0: _A(128, 128, 8, 2), 2: _A(64, 32, 8, 1)},
            128: {0: _A(128, 64, 4, 2), 1: _A(128, 32, 4, 2), 2: _A(64, 32, 8, 1)},
            256: {0: _A(128, 32, 8, 2), 2: _A(64, 32, 8, 2)},
        },
        "ampere": _FORWARD,
        "small": _FORWARD,
        "hip": {
            128: {0: _A(64, 64, 4, 1), 2: _A(64, 32, 4, 1)},
            256: {0: _A(64, 32, 4, 1), 2: _A(32, 32, 4, 1)},
        },
    },
    "dkdv": {
        "hopper": {
            64: {0: _A(64, 128, 8, 3), 4: _A(32, 128, 8, 2)},
            # 9bb90cd, "tiles of attention_dkdv causal", without burdens: 957 us, 64 x 128 1126.
            128: {0: _A(64, 64, 4, 2), 1: _A(32, 128, 8, 2), 4: _A(32, 128, 8, 2, split=True)},
            256: {
                0: _A(32, 128, 8, 2, split=True, tma=False),
                1: _A(16, 128, 8, 2, split=True),
                3: _A(16, 128, 8, 2, split=True, tma=False),
            },
        },
        "blackwell": {
            64: {0: _A(64, 64, 8, 2)},
            128: {0: _A(64, 64, 8, 2), 2: _A(32, 64, 4, 2, split=True)},
            256: {0: _A(32, 64, 8, 2, split=True)},
        },
        "ampere": {
            64: {0: _A(32, 128, 8, 2), 4: _A(64, 32, 8, 2)},
            128: {0: _A(16, 128, 8, 2), 4: _A(64, 32, 8, 2)},
            256: {0: _A(64, 32, 8, 2), 1: _A(64, 32, 8, 1), 3: _A(64, 32, 8, 2)},
        },
        "small": {
            64: {0: _A(32, 128, 8, 2), 4: _A(64, 32, 8, 2)},
            128: {0: _A(16, 128, 8, 2), 4: _A(64, 32, 8, 2)},
            256: {0: _A(64, 32, 8, 1, split=True), 1: _A(32, 32, 4, 1, split=True)},
        },
        "hip": {
            64: {0: _A(32, 64, 4, 1)},
            128: {0: _A(32, 64, 4, 1, split=True)},
            256: {0: _A(32, 32, 4, 1, split=True)},
        },
    },
    "dq": {
        "hopper": {
            64: {0: _A(128, 128, 8, 3), 3: _A(128, 64, 8, 2)},
            128: {0: _A(128, 128, 8, 2), 1: _A(128, 64, 8, 2), 3: _A(128, 32, 8, 2)},
            256: {0: _A(128, 32, 8, 2), 1: _A(128, 16, 8, 2), 3: _A(128, 16, 8, 2, tma=False)},
        },
        "blackwell": {
            64: {0: _A(128, 64, 8, 2), 2: _A(128, 32, 8, 2)},
            128: {0: _A(128, 64, 8, 2), 1: _A(128, 32, 8, 2)},
            256: {0: _A(64, 32, 8, 2), 1: _A(64, 32, 8, 1), 3: _A(64, 32, 8, 2)},
        },
        "ampere": {
            64: {0: _A(128, 64, 8, 2), 3: _A(128, 32, 8, 2), 4: _A(32, 64, 8, 2)},
            128: {
                0: _A(128, 64, 8, 2),
                1: _A(128, 32, 8, 2),
                3: _A(64, 64, 8, 2),
                4: _A(32, 64, 8, 2),
            },
            256: {0: _A(32, 64, 8, 2)},
        },
        "small": {
            64: {0: _A(128, 64, 8, 2), 3: _A(128, 32, 8, 2), 4: _A(32, 64, 8, 2)},
            128: {0: _A(128, 32, 8, 2), 3: _A(64, 64, 8, 2), 4: _A(32, 64, 8, 2)},
            256: {0: _A(32, 64, 8, 1)},
        },
        "hip": {
            64: {0: _A(64, 64, 4, 1), 2: _A(64, 32, 4, 1)},
            128: {0: _A(64, 32, 4, 1)},
            256: {0: _A(32, 32, 4, 1)},
        },
    },
    "mask": {
        "hopper": _MASK_GRADIENT,
        "blackwell": _MASK_GRADIENT,
        "ampere": {64: {0: _A(64, 32, 4, 2)}, 256: {0: _A(16, 32, 4, 2)}},
        "small": {256: {0: _A(16, 32, 4, 2)}},
        "hip": {128: {0: _A(32, 32, 4, 1)}, 256: {0: _A(16, 32, 4, 1)}},
    },
}
_INTERPRETED_ATTENTION = _A(16, 32, 4, 1)


def burdens(call: AttentionArgs) -> int:
    """Count options other than products that take registers, up to 2; masks count 3, or 4."""
    shared = call.spec.num_heads != call.spec.num_kv_heads
    things = sum((call.spec.dropout > 0.0, call.spec.softcap != 0.0, ends_early(call), shared))
    if call.masked and things > 1:
        return 4
    return 3 if call.masked else min(2, things)


def ends_early(call: AttentionArgs) -> bool:
    """Return whether keys end before the tensor does: what is beyond must not be read."""
    return call.lengths is not None or call.cu_q is not None


def attention_tile(kernel: str, target: Target, width: int, call: AttentionArgs) -> AttentionTile:
    """Return the tile of the kernel "fwd", "dkdv", "dq" or "mask", for heads up to `width` wide.

    On Hopper half of one of 128 queries and 8 warps, if these are too few for every multiprocessor:
    a thread has as much to hold, unless it loads keys through pointers. Elsewhere Triton divides
    fewer rows among warps in another way. Of dk and dv, groups of query heads are divided instead.
    """
    if target.kind == "interpreter":
        return _INTERPRETED_ATTENTION
    tiles = ATTENTION_TILES[kernel][family(target)]
    fitting = tiles[next(w for w in tiles if width <= w)]
    tile = fitting[max(n for n in fitting if n <= burdens(call))]
    large = kernel in ("fwd", "dq") and (tile.block_m, tile.warps) == (128, 8)
    few = large and _programs(kernel, call, tile) < _wanted(target, call)
    if few and family(target) == "hopper" and tile.tma and not ends_early(call):
        return replace(tile, block_m=64, warps=4)
    return tile


def group_parts(target: Target, call: AttentionArgs, tile: AttentionTile) -> int:
    """Return the number of programs for the query heads of a key head, for dk and dv."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    parts = min(group, cdiv(_wanted(target, call), max(1, _programs("dkdv", call, tile))))
    return cdiv(group, cdiv(group, parts))


def _programs(kernel: str, call: AttentionArgs, tile: AttentionTile) -> int:
    if kernel == "dkdv":
        return cdiv(call.kv_len, tile.block_n) * call.batch * call.spec.num_kv_heads
    return cdiv(call.q_len, tile.block_m) * call.batch * call.spec.num_heads


def _wanted(target: Target, call: AttentionArgs) -> int:
    # Two a multiprocessor where long and short ones even out.
    return target.sms * (1 if call.spec.window == (-1, -1) else 2)
