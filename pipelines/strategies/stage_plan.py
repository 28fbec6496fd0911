"""Which blocks of a decoder each stage of a pipeline has, which worker has the stage, and how many micro-batches it keeps.

Stages are cut so that the costliest costs as little as can be: a block's operations, and for the last stage those of the
head. The first has the embedding, whose rows are looked up and cost next to nothing.

    cut_stages(shape, vocabulary_size=50257, stages=2)        # [range(0, 9), range(9, 12)], of twelve blocks
    stage_workers(stages=4, workers=2, schedule="zbv")        # (0, 1, 1, 0)
    micro_batches_held("1f1b", worker=0, workers=2, count=8)  # [2]: so many are on their way in its stage
"""

from functools import cache
from typing import Literal

from raystride.model.shape import DecoderShape, matrices, query_width

Schedule = Literal["1f1b", "interleaved", "zbv"]


def stage_workers(stages: int, workers: int, schedule: Schedule) -> tuple[int, ...]:
    """Which worker has which stage: round and round, or there and back (zbv, whose two ends are one worker's)."""
    there = tuple(stage % workers for stage in range(stages))
    return there if schedule != "zbv" else (*range(workers), *reversed(range(workers)))


def cut_stages(shape: DecoderShape, vocabulary_size: int, stages: int) -> list[range]:
    """The blocks of each stage, one at least. Raises ValueError where there are fewer blocks than stages."""
    if shape.layers < stages:
        raise ValueError(
            f"{shape.layers} layers cannot be cut into {stages} stages: lower scaling.pipeline to {shape.layers}"
        )
    block = 6.0 * matrices(shape) + 12.0 * query_width(shape) * shape.context
    head = 6.0 * vocabulary_size * shape.width

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The least cost of the costliest of the `left` last stages, which begin with block `first`; and where they end."""
        if left == 1:
            return (shape.layers - first) * block + head, (shape.layers,)
        options = (
            (max((end - first) * block, best(end, left - 1)[0]), (end, *best(end, left - 1)[1]))
            for end in range(first + 1, shape.layers - left + 2)
        )
        # Of equal ones that which leaves the last stages least.
        return min(options, key=lambda option: (option[0], tuple(-end for end in option[1])))

    ends = best(0, stages)[1]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def micro_batches_held(schedule: Schedule, worker: int, workers: int, count: int) -> list[int]:
    """Of `count` micro-batches a step, how many each stage of a worker has had forward but not backward, at the most.

    In the order of its stages, just before its first backward. 1F1B: one for each stage from here on (Narayanan et al.,
    2019). Interleaved: the warm-up of Narayanan et al. (2021, section 2.2) by turns of the workers' number, as PyTorch makes
    it. There and back: two a worker in all, whichever it is (Qi et al., 2024, section 6).
    """
    after = workers - 1 - worker
    if schedule == "1f1b":
        return [min(count, after + 1)]
    if schedule == "zbv":
        return [min(count, workers + after + 1), min(count, worker)]
    turn = count // max(1, count // workers)
    begun = min(turn + 2 * after + 1, 2 * count)
    second = sum(number // turn % 2 for number in range(begun))
    return [begun - second, second]
