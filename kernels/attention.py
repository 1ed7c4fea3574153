"""Attention by blocks: what forward and backward share, and the forward.

Heads x (B, H, S, E) are a pointer and `Strides`, or a tensor descriptor (TMA) over all four
dimensions whose block is (1, 1, rows, BLOCK_E); TMA says which. Triton launches a descriptor only
as an argument of its own, so a kernel takes heads one by one, their strides together (`strides`),
and makes each `Heads`. E and V, the widths of a head in q, k and in v, are padded to powers of two
by reading 0 outside.

Which keys a query sees is an interval (`seen_keys`: causal, window, lengths, packed sequences), and
inside it what the masks allow. A block of keys that every query of a tile sees whole takes no mask
arithmetic; one that none sees is not visited. Seen from the keys, the same holds for queries.
Where there are masks, a list made beforehand (`kernels.attention_masks`) says which block is which.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.activations import tanh_fwd
from fused_remat.kernels.dropout import Site, keep_at, split_key

LOG2E = tl.constexpr(1.4426950408889634)

#: `triton.jit` for attention's kernels: another window, offset, key, first row or threshold is not
#: another kernel. Triton does not look for these names in groups, so they are arguments themselves.
windowed = triton.jit(
    do_not_specialize=["offset", "left", "right", "row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr"],
)


class Masks(NamedTuple):
    """What is added to scores, or excludes them; a pointer that a call has no use for is None.

    mask broadcasts to (B, H, S_q, S_k) by strides of 0, padding is (B, S_k): float, added; or
    uint8, a bool: True is excluded, in mask takes part instead where KEEPS, a constant. shift
    (B, H, S_q) is subtracted: the largest of what is added to a row, if that is far from 0.
    """

    mask: Any
    stride_mb: Any
    stride_mh: Any
    stride_mm: Any
    stride_mn: Any
    padding: Any
    stride_pb: Any
    stride_pn: Any
    shift: Any
    stride_sb: Any
    stride_sh: Any
    KEEPS: Any


class Scores(NamedTuple):
    """Options of the scores, as in `fused_remat.spec.AttentionSpec`; None for one that is not set.

    scores = scale q kᵀ, or softcap · tanh(scale q kᵀ / softcap), plus masks. scale must not be
    negative.
    """

    scale: Any
    softcap: Any


class Strides(NamedTuple):
    """Of heads, in elements: from one sequence, head and token to the next."""

    batch: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """H query heads, GROUP a key head, in PARTS for dk, dv; M queries, N keys; widths E and V."""

    H: Any
    GROUP: Any
    M: Any
    N: Any
    E: Any
    V: Any
    PARTS: Any


class Tile(NamedTuple):
    """How attention is computed: constants.

    BLOCK_M queries and BLOCK_N keys, of heads padded to BLOCK_E and BLOCK_V; EVEN_E, EVEN_V: heads
    are that wide. TMA: heads are descriptors. PARTIAL: there may be blocks that not every query
    sees.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_E: int
    BLOCK_V: int
    EVEN_E: bool = False
    EVEN_V: bool = False
    TMA: bool = False
    PARTIAL: bool = False


class Heads(NamedTuple):
    """Heads in a kernel: a pointer or descriptor, and `Strides`."""

    data: Any
    strides: Any


class Lists(NamedTuple):
    """Lists of blocks, by `attention_blocks_fwd_kernel`; strides of batch and head, 0 if shared."""

    data: Any
    batch: Any
    head: Any


class Visits(NamedTuple):
    """`count` blocks: number i is start + i if i < left, else gap + i; or it is in a list."""

    start: Any
    left: Any
    gap: Any
    count: Any


@triton.jit
def load_rows(
    x, b, h, row, first, end, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows `row` to row + BLOCK_M of head (b, h), padded to BLOCK_E unless EVEN; 0 outside.

    Outside is a row before `first` or from `end` on, and a column from E on.
    A descriptor ends rows where the tensor ends: `first` and `end` must be 0 and S.
    """
    if TMA:
        tile = x.data.load([b, h, row, 0]).reshape([BLOCK_M, BLOCK_E])
    else:
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_e = tl.arange(0, BLOCK_E)
        mask = ((offs_m >= first) & (offs_m < end))[:, None]
        if not EVEN:
            mask = mask & (offs_e < E)[None, :]
        base = x.data + b.to(tl.int64) * x.strides.batch + h.to(tl.int64) * x.strides.head
        ptrs = base + offs_m.to(tl.int64)[:, None] * x.strides.row + offs_e[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(x, b, h, row, end, E, tile):
    """Store a tile from row `row` of head (b, h) on, in the dtype of the tensor."""
    offs_m = row + tl.arange(0, tile.shape[0])
    offs_e = tl.arange(0, tile.shape[1])
    base = x.data + b.to(tl.int64) * x.strides.batch + h.to(tl.int64) * x.strides.head
    ptrs = base + offs_m.to(tl.int64)[:, None] * x.strides.row + offs_e[None, :]
    mask = (offs_m < end)[:, None] & (offs_e < E)[None, :]
    tl.store(ptrs, tile.to(x.data.dtype.element_ty), mask=mask)


@triton.jit
def seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right):
    """Return the keys that each query sees, from the first to one past the last.

    Query m sees keys m + offset - left to m + offset + right; no key from lengths[b] on. Of packed
    sequences bounds (M, 2) holds the interval. Queries from M on see what the last one sees.
    """
    offs_m = tl.minimum(offs_m, M - 1)
    if bounds_ptr is not None:
        low = tl.load(bounds_ptr + 2 * offs_m)
        high = tl.load(bounds_ptr + 2 * offs_m + 1)
    else:
        end = N
        if lengths_ptr is not None:
            end = tl.minimum(N, tl.load(lengths_ptr + b).to(tl.int32))
        low = tl.maximum(offs_m + (offset - left), 0)
        high = tl.minimum(offs_m + (offset + right + 1), end)
    return low, high


@triton.jit
def seeing_queries(offs_n, b, bounds_ptr, lengths_ptr, M, N, offset, left, right):
    """Return the queries that see each key, from first to one past the last: `seen_keys`, inverted.

    bounds is (N, 2) here. Keys from N on are seen where the last one is; M to 0 is none.
    """
    offs_n = tl.minimum(offs_n, N - 1)
    if bounds_ptr is not None:
        low = tl.load(bounds_ptr + 2 * offs_n)
        high = tl.load(bounds_ptr + 2 * offs_n + 1)
    else:
        low = tl.maximum(offs_n - (offset + right), 0)
        high = tl.minimum(offs_n - (offset - left - 1), M)
        if lengths_ptr is not None:
            hidden = offs_n >= tl.load(lengths_ptr + b).to(tl.int32)
            low = tl.where(hidden, M, low)
            high = tl.where(hidden, 0, high)
    return low, high


@triton.jit
def visits(low, high, BLOCK: tl.constexpr):
    """Return `Visits` of the blocks that not every row of a tile fully sees, and of the others."""
    start = tl.min(low, 0) // BLOCK
    stop = tl.maximum(tl.cdiv(tl.max(high, 0), BLOCK), start)
    full_start = tl.minimum(tl.cdiv(tl.max(low, 0), BLOCK), stop)
    full = tl.maximum(tl.min(high, 0) // BLOCK - full_start, 0)
    left = full_start - start
    partial = Visits(start, left, start + full, stop - start - full)
    return partial, Visits(full_start, full, full_start, full)


@triton.jit
def listed(lists, b, h, tile, width):
    """`visits` from the lists of a tile's blocks, which are `width` at most, after the two lists.

    A row of `attention_blocks_fwd_kernel`: partial blocks from its front, the others up to its end.
    """
    row_ptr = lists.data + b.to(tl.int64) * lists.batch + h.to(tl.int64) * lists.head
    row_ptr += tile.to(tl.int64) * (width + 2)
    partial, full = tl.load(row_ptr + width), tl.load(row_ptr + width + 1)
    full_ptr = row_ptr + width - full
    return row_ptr, full_ptr, Visits(0, 0, 0, partial), Visits(0, 0, 0, full)


@triton.jit
def block_at(i, visit, list_ptr):
    """Return the number of the i-th block to visit, from a list unless that is None."""
    if list_ptr is not None:
        block = tl.load(list_ptr + i)
    else:
        block = i + tl.where(i < visit.left, visit.start, visit.gap)
    return block


@triton.jit
def masked(s, masks, b, h, offs_m, offs_n, M, N):
    """Scores with both masks; offs_m and offs_n broadcast to the tile, either way round."""
    bias = tl.zeros_like(s)
    inside = (offs_m < M) & (offs_n < N)
    if masks.mask is not None:
        base = masks.mask + b.to(tl.int64) * masks.stride_mb + h.to(tl.int64) * masks.stride_mh
        rows = offs_m.to(tl.int64) * masks.stride_mm
        mask = tl.load(base + rows + offs_n.to(tl.int64) * masks.stride_mn, mask=inside, other=0)
        if masks.mask.dtype.element_ty.is_floating():
            bias += mask.to(tl.float32)
        else:
            if masks.KEEPS:
                hidden = mask == 0
            else:
                hidden = mask != 0
            bias = tl.where(hidden, float("-inf"), bias)
    if masks.padding is not None:
        base = masks.padding + b.to(tl.int64) * masks.stride_pb
        ptrs = base + offs_n.to(tl.int64) * masks.stride_pn
        padding = tl.load(ptrs, mask=offs_n < N, other=0)
        if masks.padding.dtype.element_ty.is_floating():
            bias += padding.to(tl.float32)
        else:
            bias = tl.where(padding != 0, float("-inf"), bias)
    if masks.shift is not None:
        base = masks.shift + b.to(tl.int64) * masks.stride_sb + h.to(tl.int64) * masks.stride_sh
        bias -= tl.load(base + offs_m, mask=offs_m < M, other=0.0)
    return s + bias


@triton.jit
def scores(qk, masks, b, h, offs_m, offs_n, offs, low, high, M, N, score, PARTIAL: tl.constexpr):
    """Scores of a tile of q kᵀ, -inf where excluded; and tanh of the soft-cap, if there is one.

    Where PARTIAL, masks apply, and `offs`, one of offs_m and offs_n, must be in [low, high).
    """
    s = qk * score.scale
    capped = s
    if score.softcap is not None:
        capped = tanh_fwd(s / score.softcap)
        s = score.softcap * capped
    if PARTIAL:
        if (masks.mask is not None) or (masks.padding is not None):
            s = masked(s, masks, b, h, offs_m, offs_n, M, N)
        s = tl.where((offs >= low) & (offs < high), s, float("-inf"))
    return s, capped


@triton.jit
def exponentials(s, top, scale, RAW: tl.constexpr):
    """exp(s - top); where RAW, s is q kᵀ yet to be scaled, which costs nothing more."""
    if RAW:
        p = tl.exp2(s * (scale * LOG2E) - top * LOG2E)
    else:  # far scores would overflow in units of log 2
        p = tl.exp2((s - top) * LOG2E)
    return p


@triton.jit
def _attend(
    acc, total, top, q, k, v, masks, row_key, site, b, h, kv_h, offs_m, low, high, first, end,
    visit, list_ptr, sizes, score, PARTIAL: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for each block of keys of `visit`."""
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    for i in range(0, visit.count):
        col = block_at(i, visit, list_ptr) * BLOCK_N
        k_tile = load_rows(
            k, b, kv_h, col, first, end, sizes.E, BLOCK_N, tile.BLOCK_E, tile.EVEN_E, tile.TMA
        )
        qk = tl.dot(q, k_tile.T)
        offs_n = col + tl.arange(0, BLOCK_N)
        if RAW:
            s = qk
            new_top = tl.maximum(top, tl.max(s, 1) * score.scale)
        else:
            s, _ = scores(
                qk, masks, b, h, offs_m[:, None], offs_n[None, :], offs_n[None, :], low[:, None],
                high[:, None], sizes.M, sizes.N, score, PARTIAL,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(s, 1))
        # Of a row that has seen no key yet: -inf - -inf would be NaN.
        around = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = exponentials(s, around[:, None], score.scale, RAW)
        shrink = tl.exp2((top - around) * LOG2E)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if row_key is not None:
            p *= keep_at(row_key[:, None], offs_n[None, :], site.threshold, site.scale)
        v_tile = load_rows(
            v, b, kv_h, col, first, end, sizes.V, BLOCK_N, tile.BLOCK_V, tile.EVEN_V, tile.TMA
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        top = new_top
    return acc, total, top


@triton.jit
def row_keys(site, b, h, sizes, offs_m):
    """Return the dropout keys of queries of a head; None where there is no site."""
    keys = None
    if site.key_ptr is not None:
        row = site.row0 + (b * sizes.H + h).to(tl.int64) * sizes.M + offs_m
        keys = split_key(tl.load(site.key_ptr), row)
    return keys


@triton.jit
def tile_of_head(blocks, H, REVERSED: tl.constexpr):
    """Return this program's tile, batch and head; tiles of a head side by side, for the cache.

    REVERSED: the last tile first, which has most to do where masks are causal.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    if REVERSED:
        block = blocks - 1 - block
    return block, pid // blocks // H, pid // blocks % H


@windowed
def attention_fwd_kernel(
    q, k, v, masks, bounds_ptr, lengths_ptr, lists, site_key_ptr, out, lse_ptr, strides, sizes,
    score, offset, left, right, row0, threshold, keep_scale, tile: tl.constexpr,
):  # fmt: skip
    """Compute out = dropout(softmax(scores)) v and lse = log sum exp(scores); of no key 0 and +inf.

    scores: as `Scores` describes, plus masks.
    Shapes: q (B, H, M, E), k (B, H / GROUP, N, E), v (B, H / GROUP, N, V), out (B, H, M, V),
        lse (B, H, M) float32, contiguous; site_key () int64. lists: for each tile of queries, or
        None. Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: FLOPs = 2·M·N·(E + V) a head; about 12 more operations an element of scores.
    Source: Dao et al. 2022; Milakov, Gimelshein 2018 (online softmax).
    """
    q, k = Heads(q, strides[0]), Heads(k, strides[1])
    v, out = Heads(v, strides[2]), Heads(out, strides[3])
    site = Site(site_key_ptr, row0, threshold, keep_scale)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    M, N = sizes.M, sizes.N
    number, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), sizes.H, True)
    row = number * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, N
    if (bounds_ptr is not None) or (lengths_ptr is not None):
        first, end = tl.min(low, 0), tl.max(high, 0)
    kv_h = h // sizes.GROUP
    row_key = row_keys(site, b, h, sizes, offs_m)
    q_tile = load_rows(q, b, h, row, 0, M, sizes.E, BLOCK_M, tile.BLOCK_E, tile.EVEN_E, tile.TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    partial, full = visits(low, high, tile.BLOCK_N)
    partial_ptr, full_ptr = None, None
    if lists is not None:
        partial_ptr, full_ptr, partial, full = listed(lists, b, h, number, tl.cdiv(N, tile.BLOCK_N))
    acc, total, top = _attend(
        acc, total, top, q_tile, k, v, masks, row_key, site, b, h, kv_h, offs_m, low, high, first,
        end, full, full_ptr, sizes, score, False, tile,
    )  # fmt: skip
    if tile.PARTIAL:
        acc, total, top = _attend(
            acc, total, top, q_tile, k, v, masks, row_key, site, b, h, kv_h, offs_m, low, high,
            first, end, partial, partial_ptr, sizes, score, True, tile,
        )  # fmt: skip
    seen = total != 0.0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    store_rows(out, b, h, row, M, sizes.V, acc)
    tl.store(lse_ptr + (b * sizes.H + h).to(tl.int64) * M + offs_m, lse, mask=offs_m < M)
