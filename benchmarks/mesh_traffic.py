"""The bytes that workers of a mesh exchange for attention over a context and for the loss of a sharded vocabulary.

Counted from the plans and shapes that the kernels get; tests count the collectives themselves, and `WorkMesh` of the scaling
model has the same by formulas.

    bytes_sent(context_plan((0, 512), 4), "ring", heads=8, kv_heads=4, head_size=16, itemsize=2)     # a forward, by rank
    bytes_exchanged(tokens=2048)                                                                     # 24,576
"""

from raystride.triton_kernels.attention_context import Form
from raystride.triton_kernels.context_plan import ContextPlan, forwarded_rows, needed_rows


def bytes_sent(
    plan: ContextPlan,
    form: Form,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    itemsize: int,
    window: int = 0,
    backward: bool = False,
) -> list[int]:
    """Returns the bytes that each rank sends to others in one forward, or in one backward, of a layer.

    In a ring gradients have at least 4 bytes a number, since each rank adds to them.
    """
    ranks, keys = plan.ranks, 2 * kv_heads * head_size
    if form == "heads":
        # The backward reverses all transfers.
        return [plan.tokens // ranks * (ranks - 1) * (2 * heads * head_size + keys) // ranks * itemsize] * ranks
    if form == "keys":
        needed = [[len(rows) for rows in to] for to in needed_rows(plan, window)]
        rows = [sum(to) if backward else sum(to[rank] for to in needed) for rank, to in enumerate(needed)]
        return [count * keys * itemsize for count in rows]
    num_forwarded = [[*(len(rows) for rows in forwarded_rows(plan, source, window)), 0] for source in range(ranks)]
    num_sent = [sum(num_forwarded[(rank - hop) % ranks][hop + 1] for hop in range(ranks)) for rank in range(ranks)]
    if not backward:
        return [count * keys * itemsize for count in num_sent]
    # Rows that arrived at a hop are either forwarded or end: their gradient is sent once in any case.
    num_returned = [sum(num_forwarded[(rank - hop) % ranks][hop] for hop in range(1, ranks)) for rank in range(ranks)]
    return [keys * (a * itemsize + b * max(4, itemsize)) for a, b in zip(num_sent, num_returned, strict=True)]


def bytes_exchanged(tokens: int, label_smoothing: float = 0.0, *, itemsize: int = 4) -> int:
    """Returns the bytes that each of several workers all-reduces in a forward; a backward has no communication.

    `itemsize` is that of a sum: 4, or 8 for x in float64.
    """
    return tokens * itemsize * (4 if label_smoothing else 3)
