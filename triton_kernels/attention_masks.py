"""Masks, dropout and program scheduling shared by the attention kernels.

Query i of T is at position i + S - T of the S keys. With `causal` it sees the keys up to its own position, with a window of
w only the last w of those; keys from a sequence's length on are hidden. Kernels process fully visible blocks without a mask,
and mask only the border blocks on either side.

Dropout drops the weight of (batch b, head h, query i, key j) if word j mod 4 of Philox4x32-10 (Salmon et al., 2011) with the
counter (j / 4, i, h, b) and the seed as its key is small, so that backward and reference drop the same weights.

    seen, kept = visible(4, 6, causal=True), kept_weights(seed, 2, 8, 4, 6, dropout=0.1)
"""

import torch

from raystride.triton_kernels.language import jit, tl

_ROUNDS = 10
"""Rounds of Philox, as in its paper, in cuRAND and in tl.philox."""
DRAW_BITS = 24
"""Bits of a Philox word that are compared with dropout * 2^24: they fit a kernel's signed 32-bit integer."""


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int = 0,
    key_lengths: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Returns a mask, True if a query sees a key; (T, S), or (B, 1, T, S) with key_lengths (B,)."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    seen = (key <= position) if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window:
        seen = seen & (key > position - window)
    return seen if key_lengths is None else seen & (key < key_lengths[:, None, None, None])


def dropout_threshold(dropout: float) -> int:
    """Returns the threshold of the 24 random bits below which a weight is dropped."""
    return round(dropout * (1 << DRAW_BITS))


def kept_weights(
    seed: torch.Tensor,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    dropout: float,
    numbers: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Returns a mask, True if dropout keeps the weight, (B, H, T, S), bitwise as in the kernels; b is in `numbers` (B,)."""
    b, h, i, key = (torch.arange(n, device=seed.device) for n in (batch, heads, queries, keys))
    return kept_weights_at(seed, b if numbers is None else numbers, first_head + h, i[None], key[None], dropout=dropout)


def kept_weights_at(
    seed: torch.Tensor,
    numbers: torch.Tensor,
    heads: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    dropout: float,
) -> torch.Tensor:
    """Returns `kept_weights`, (B, H, T, S), for these indices of batch (B,) and heads (H,), and these positions of queries
    and keys, (B, T) and (B, S), or (1, T) and (1, S) if they are the same for the batch."""
    keys = keys[:, None, None, :]
    counter = (keys // 4, queries[:, None, :, None], heads[None, :, None, None], numbers[:, None, None, None])
    c0, c1, c2, c3 = philox(seed, *counter)
    word = torch.where(keys % 4 < 2, torch.where(keys % 4 == 0, c0, c1), torch.where(keys % 4 == 2, c2, c3))
    return (word >> (32 - DRAW_BITS)) >= dropout_threshold(dropout)


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the four 32-bit words of Philox4x32-10, in int64, for counters that broadcast; as `tl.philox` in kernels."""
    low, high = 0xFFFFFFFF, 32
    k0, k1 = seed.reshape(()) & low, (seed.reshape(()) >> high) & low
    for _ in range(_ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> high) & low) ^ c1 ^ k0, b & low, ((a >> high) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def derive_seed(seed: torch.Tensor, salt: int, first_head: int) -> torch.Tensor:
    """Returns a separate seed for each salt and first head, computed on the device; for 0 and 0 the seed itself."""
    if not (salt or first_head):
        return seed
    # Steps of a bit mixer's odd constant (Steele et al., "SplitMix", 2014), so that neighbouring seeds do not meet.
    step = (salt + (first_head << 40)) * 0x9E3779B97F4A7C15
    return seed + ((step + (1 << 63)) % (1 << 64) - (1 << 63))


@jit
def masked_work(blocks, heads, section, HEAVIEST_LAST: tl.constexpr):
    """The block and the head (of all batches) of this program.

    The first block of every head of a section comes first, then the second of each: heads that share keys run side by side,
    and a section is as many heads as have their keys and values in the L2 cache together.
    """
    program = tl.program_id(0)
    first = program // (section * blocks) * section
    place = program % (section * blocks)
    width = tl.minimum(section, heads - first)
    block = place // width
    # Under a causal mask the last rows see most keys: they begin first, so that none of them is left over at the end.
    if HEAVIEST_LAST:
        block = blocks - 1 - block
    return block, first + place % width


@jit
def packed_block(place, offsets, batch, BLOCK: tl.constexpr):
    """The packed sequence that a place of the grid works on, and which of its blocks; there may be no such block.

    Sequence b has the places from offsets[b] // BLOCK + b on, at least as many as it has blocks, so that a grid of all rows
    does for any lengths, without a list of blocks that the host would have to know (vLLM's unified attention, 2025).
    """
    low, high = tl.cast(0, tl.int32), tl.cast(batch, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(offsets + middle) // BLOCK + middle <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, place - tl.load(offsets + low) // BLOCK - low


@jit
def sequence_of(b, key_lengths, query_offsets, key_offsets, T, S):
    """Where the queries of sequence b begin and how many they are, the same of its keys, and how many keys may be seen."""
    query_start, key_start = 0, 0
    if query_offsets is not None:
        query_start = tl.load(query_offsets + b)
        key_start = tl.load(key_offsets + b)
        T = tl.load(query_offsets + b + 1) - query_start
        S = tl.load(key_offsets + b + 1) - key_start
    length = S
    if key_lengths is not None:
        length = tl.maximum(0, tl.minimum(S, tl.load(key_lengths + b).to(tl.int32)))
    return query_start, T, key_start, S, length


@jit
def entries_of(T, query_offsets):
    """How many numbers lse and delta have of T queries: a multiple of 16, so that whole vectors of them can be loaded.

    Those of packed sequences follow each other without a gap.
    """
    entries = T
    if query_offsets is None:
        entries = (T + 15) // 16 * 16
    return entries


@jit
def key_range(
    first,
    T,
    shift,
    length,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys that the rows first to first + BLOCK_M see: [start, a) in part, [a, b) whole, [b, stop) in part."""
    start, stop, b = 0, length, length // BLOCK_N * BLOCK_N
    last = tl.minimum(first + BLOCK_M, T) - 1 + shift
    if CAUSAL:
        stop = tl.maximum(0, tl.minimum(length, last + 1))
        b = tl.maximum(0, tl.minimum(length, first + shift + 1)) // BLOCK_N * BLOCK_N
    a = 0
    if WINDOWED:
        start = tl.maximum(0, first + shift - window + 1) // BLOCK_N * BLOCK_N
        a = (tl.maximum(0, last - window + 1) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        a = tl.minimum(a, tl.maximum(start, stop))
    return start, a, tl.maximum(a, b), stop


@jit
def query_range(
    first,
    T,
    shift,
    length,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Queries that see the keys first to first + BLOCK_N: [start, a) in part, [a, b) whole, [b, stop) in part."""
    start, a, b, stop = 0, 0, T, T
    if CAUSAL:
        start = tl.minimum(T, tl.maximum(0, first - shift)) // BLOCK_M * BLOCK_M
        a = (tl.maximum(0, first + BLOCK_N - 1 - shift) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if WINDOWED:
        stop = tl.maximum(0, tl.minimum(T, first + BLOCK_N - 1 + window - shift))
        b = tl.maximum(0, tl.minimum(T, first + window - shift)) // BLOCK_M * BLOCK_M
    if first >= length:
        stop = start
    a = tl.minimum(a, tl.maximum(start, stop))
    b = tl.minimum(tl.maximum(a, b), tl.maximum(a, stop))
    return start, a, b, stop


@jit
def is_visible(query, key, shift, length, window, LENGTHS: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """`visible` for a block; query and key broadcast against each other. LENGTHS: there are key lengths.

    Without them a causal query sees no key from S on anyway, and a comparison less is 116 bytes less spilled on sm_100.
    """
    if CAUSAL:
        seen = key <= query + shift
        if LENGTHS:
            seen = seen & (key < length)
    else:
        seen = key < length
    if WINDOWED:
        seen = seen & (key > query + shift - window)
    return seen


@jit
def capped(s, cap):
    """cap tanh(s / cap). By an exponential, which every GPU has; off by 2^-22 cap."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * 1.4426950408889634 / cap))))


@jit
def is_kept(seed, b, h, query, key, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`kept_weights` for the block (BLOCK_M, BLOCK_N) that begins at (query, key); key is a multiple of 4.

    One Philox gives four words, of four neighbouring keys: ten rounds for each weight would cost more than its product.
    """
    c0 = (key // 4 + tl.arange(0, BLOCK_N // 4))[None, :] + tl.zeros([BLOCK_M, 1], tl.int32)
    c1 = (query + tl.arange(0, BLOCK_M))[:, None] + tl.zeros([1, BLOCK_N // 4], tl.int32)
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), c0, c1, zero + h, zero + b)
    # In this order the four words lie side by side once the two new dimensions are the last.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK_M, BLOCK_N)
    # The upper 24 of 32 bits, which are positive as int32.
    return (words >> 8).to(tl.int32) >= threshold


@jit
def load_rows(
    x, b, h, start, first, length, stride_b, stride_h, stride_t,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Rows first to first + BLOCK of the sequence that begins at row start of (b, h); zeros beyond its length and D."""
    if DESCRIPTORS:
        block = x.load([b, h, first, 0]).reshape(BLOCK, BLOCK_D)
    else:
        # 64 bits up to the block, 32 within it.
        rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        x += tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h + tl.cast(start + first, tl.int64) * stride_t
        inside = (first + rows < length)[:, None]
        if D < BLOCK_D:
            inside = inside & (columns < D)[None, :]
        block = tl.load(x + rows[:, None] * stride_t + columns[None, :], mask=inside, other=0.0)
    return block


@jit
def store_rows(
    x, block, b, h, start, first, length, stride_b, stride_h, stride_t,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Stores what `load_rows` would load."""
    if DESCRIPTORS:
        x.store([b, h, first, 0], block.to(x.dtype).reshape(1, 1, BLOCK, BLOCK_D))
    else:
        rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        x += tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h + tl.cast(start + first, tl.int64) * stride_t
        inside = (first + rows < length)[:, None]
        if D < BLOCK_D:
            inside = inside & (columns < D)[None, :]
        tl.store(x + rows[:, None] * stride_t + columns[None, :], block.to(x.dtype.element_ty), mask=inside)


@jit
def product_of_rows(
    x, x_start, x_first, x_length, x_h, x_stride_b, x_stride_h, x_stride_t,
    y, y_start, y_first, y_length, y_h, y_stride_b, y_stride_h, y_stride_t,
    b, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Y^T of rows of (b, x_h) and (b, y_h), loaded so many columns at a time: fp32 that fits the registers."""
    x_rows, y_rows, columns = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_Y), tl.arange(0, CHUNK)
    x += tl.cast(b, tl.int64) * x_stride_b + tl.cast(x_h, tl.int64) * x_stride_h
    x += tl.cast(x_start + x_first, tl.int64) * x_stride_t
    y += tl.cast(b, tl.int64) * y_stride_b + tl.cast(y_h, tl.int64) * y_stride_h
    y += tl.cast(y_start + y_first, tl.int64) * y_stride_t
    product = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
    for d in tl.range(0, D, CHUNK, num_stages=1):
        inside = (d + columns < D)[None, :]
        x_mask, y_mask = (x_first + x_rows < x_length)[:, None] & inside, (y_first + y_rows < y_length)[:, None] & inside
        x_block = tl.load(x + d + x_rows[:, None] * x_stride_t + columns[None, :], mask=x_mask, other=0.0)
        y_block = tl.load(y + d + y_rows[:, None] * y_stride_t + columns[None, :], mask=y_mask, other=0.0)
        product = tl.dot(x_block, tl.trans(y_block), product, input_precision=PRECISION)
    return product
