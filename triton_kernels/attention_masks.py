"""Masks, dropout and program scheduling shared by the attention kernels.

Query i of T is at position i + S - T of the S keys. With `causal` it sees the keys up to its own position, with a window of
w only the last w of those; keys from a sequence's length on are hidden. Kernels process fully visible blocks without a mask,
and mask only the border blocks on either side.

Dropout drops the weight of (batch b, head h, query i, key j) if word j mod 4 of Philox4x32-10 (Salmon et al., 2011) with the
counter (j / 4, i, h, b) and the seed as its key is small, so that backward and reference drop the same weights. With int32
keys (B,) for a seed, each row has its own, and the mask is that of `row_masks`: a row's does not depend on the others.

    seen, kept = visible(4, 6, causal=True), kept_weights(seed, 2, 8, 4, 6, dropout=0.1)
"""

import torch

from raystride.triton_kernels.language import jit, tl
from raystride.triton_kernels.row_masks import fold, fold_key, kept_block, kept_by_row

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
    if seed.dtype == torch.int32:
        keys_of_rows = seed if numbers is None else seed[numbers]
        every_head = first_head + torch.arange(heads, device=seed.device)
        return kept_by_row(fold(keys_of_rows[:, None], every_head), queries, keys, dropout=dropout)
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
    """Returns a separate seed for each salt and first head, computed on the device; for 0 and 0 the seed itself.

    Keys of rows know no salt; those of a first head drop what it does among all heads.
    """
    if not (salt or first_head):
        return seed
    if seed.dtype == torch.int32:
        return fold(seed, torch.tensor(first_head, device=seed.device))
    # Steps of a bit mixer's odd constant (Steele et al., "SplitMix", 2014), so that neighbouring seeds do not meet.
    step = (salt + (first_head << 40)) * 0x9E3779B97F4A7C15
    return seed + ((step + (1 << 63)) % (1 << 64) - (1 << 63))


@jit
def assigned_work(program, rows, heads, batch, section, offsets, BLOCK: tl.constexpr, HEAVIEST_LAST: tl.constexpr):
    """The sequence, the head and the block of its `rows` that is work number `program` of `Sequences.num_programs`.

    The first block of every head of a section comes first, then the second of each: heads that share keys run side by side,
    and a section is as many heads as have their keys and values in the L2 cache together. Packed sequences share `rows`;
    there may be no such block.
    """
    blocks, all_heads = tl.cdiv(rows, BLOCK), batch * heads
    if offsets is not None:
        blocks, all_heads = rows // BLOCK + batch, heads
    first = program // (section * blocks) * section
    place = program % (section * blocks)
    width = tl.minimum(section, all_heads - first)
    block, head = place // width, first + place % width
    # Under a causal mask the last rows see most keys: they begin first, so that none of them is left over at the end.
    if HEAVIEST_LAST:
        block = blocks - 1 - block
    b, h = head // heads, head % heads
    if offsets is not None:
        b, block = packed_block(block, offsets, batch, BLOCK)
    return b, h, block


@jit
def work_of_turn(turn):
    """The number of a persistent program's work in a turn: every other turn goes backwards, so that heavy meets light."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


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
def sequence_of(b, bounds, T, S):
    """Where the queries of sequence b begin and how many they are, the same of its keys, and how many keys may be seen."""
    query_start, key_start = 0, 0
    if bounds.query_offsets is not None:
        query_start = tl.load(bounds.query_offsets + b)
        key_start = tl.load(bounds.key_offsets + b)
        T = tl.load(bounds.query_offsets + b + 1) - query_start
        S = tl.load(bounds.key_offsets + b + 1) - key_start
    length = S
    if bounds.key_lengths is not None:
        length = tl.maximum(0, tl.minimum(S, tl.load(bounds.key_lengths + b).to(tl.int32)))
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
def key_range(first, T, shift, length, window, config):
    """Keys that the rows first to first + block_m see: [start, a) in part, [a, b) whole, [b, stop) in part."""
    start, stop, b = 0, length, length // config.block_n * config.block_n
    last = tl.minimum(first + config.block_m, T) - 1 + shift
    if config.causal:
        stop = tl.maximum(0, tl.minimum(length, last + 1))
        b = tl.maximum(0, tl.minimum(length, first + shift + 1)) // config.block_n * config.block_n
    a = 0
    if config.windowed:
        start = tl.maximum(0, first + shift - window + 1) // config.block_n * config.block_n
        a = (tl.maximum(0, last - window + 1) + config.block_n - 1) // config.block_n * config.block_n
        a = tl.minimum(a, tl.maximum(start, stop))
    return start, a, tl.maximum(a, b), stop


@jit
def query_range(first, T, shift, length, window, config):
    """Queries that see the keys first to first + block_n: [start, a) in part, [a, b) whole, [b, stop) in part."""
    start, a, b, stop = 0, 0, T, T
    if config.causal:
        start = tl.minimum(T, tl.maximum(0, first - shift)) // config.block_m * config.block_m
        a = (tl.maximum(0, first + config.block_n - 1 - shift) + config.block_m - 1) // config.block_m * config.block_m
    if config.windowed:
        stop = tl.maximum(0, tl.minimum(T, first + config.block_n - 1 + window - shift))
        b = tl.maximum(0, tl.minimum(T, first + window - shift)) // config.block_m * config.block_m
    if first >= length:
        stop = start
    a = tl.minimum(a, tl.maximum(start, stop))
    b = tl.minimum(tl.maximum(a, b), tl.maximum(a, stop))
    return start, a, b, stop


@jit
def is_visible(query, key, shift, length, window, LENGTHS: tl.constexpr, config):
    """`visible` for a block; query and key broadcast against each other. LENGTHS: there are key lengths.

    Without them a causal query sees no key from S on anyway, and a comparison less is 116 bytes less spilled on sm_100.
    """
    if config.causal:
        seen = key <= query + shift
        if LENGTHS:
            seen = seen & (key < length)
    else:
        seen = key < length
    if config.windowed:
        seen = seen & (key > query + shift - window)
    return seen


@jit
def capped(s, cap):
    """cap tanh(s / cap). By an exponential, which every GPU has; off by 2^-22 cap."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * 1.4426950408889634 / cap))))


@jit
def is_kept(rules, b, h, query, key, config):
    """`kept_weights` for the block (block_m, block_n) that begins at (query, key); key is a multiple of 4.

    One Philox gives four words, of four neighbouring keys: ten rounds for each weight would cost more than its product.
    """
    if rules.seed.dtype.element_ty == tl.int32:
        i = (query + tl.arange(0, config.block_m))[:, None]
        j = (key + tl.arange(0, config.block_n))[None, :]
        kept = kept_block(fold_key(tl.load(rules.seed + b), h), i, j, rules.threshold)
    else:
        c0 = (key // 4 + tl.arange(0, config.block_n // 4))[None, :] + tl.zeros([config.block_m, 1], tl.int32)
        c1 = (query + tl.arange(0, config.block_m))[:, None] + tl.zeros([1, config.block_n // 4], tl.int32)
        zero = tl.zeros([config.block_m, config.block_n // 4], tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(rules.seed), c0, c1, zero + h, zero + b)
        # In this order the four words lie side by side once the two new dimensions are the last.
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(config.block_m, config.block_n)
        # The upper 24 of 32 bits, which are positive as int32.
        kept = (words >> 8).to(tl.int32) >= rules.threshold
    return kept
