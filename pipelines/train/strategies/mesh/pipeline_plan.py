"""Plans pipeline stages: the blocks of each stage, its worker, and the number of micro-batches in flight.

Stages are cut to minimise the cost of the costliest: its blocks' operations, plus the head's for the last stage. The first
has the embedding: looking up its rows costs almost nothing.

    split_into_stages(shape, vocabulary_size=50257, stages=2)           # [range(0, 9), range(9, 12)], of twelve blocks
    assign_stages(stages=4, workers=2, schedule="zbv")                  # (0, 1, 1, 0)
    max_micro_batches_in_flight("1f1b", worker=0, workers=2, count=8)   # [2]: in flight in its stage
"""

from functools import cache
from typing import Literal

from raystride.model.shape import DecoderShape, block_matrix_weights, query_width

Schedule = Literal["1f1b", "interleaved", "zbv"]


def assign_stages(stages: int, workers: int, schedule: Schedule) -> tuple[int, ...]:
    """Returns the worker of each stage: round-robin, or forth and back (zbv: the first worker has both ends)."""
    round_robin = tuple(stage % workers for stage in range(stages))
    return round_robin if schedule != "zbv" else (*range(workers), *reversed(range(workers)))


def split_into_stages(shape: DecoderShape, vocabulary_size: int, stages: int) -> list[range]:
    """Returns the blocks of each stage, at least one. Raises ValueError if there are fewer blocks than stages."""
    if shape.layers < stages:
        raise ValueError(
            f"{shape.layers} layers cannot be cut into {stages} stages: lower scaling.pipeline to {shape.layers}"
        )
    block = 6.0 * block_matrix_weights(shape) + 12.0 * query_width(shape) * shape.context
    head = 6.0 * vocabulary_size * shape.hidden_size

    @cache
    def best_split(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Returns the least cost of the costliest of the `left` last stages, from block `first` on, and the stages' ends."""
        if left == 1:
            return (shape.layers - first) * block + head, (shape.layers,)
        options = (
            (max((end - first) * block, best_split(end, left - 1)[0]), (end, *best_split(end, left - 1)[1]))
            for end in range(first + 1, shape.layers - left + 2)
        )
        # Of equal ones, the split that gives the last stages fewest blocks.
        return min(options, key=lambda option: (option[0], tuple(-end for end in option[1])))

    ends = best_split(0, stages)[1]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def max_micro_batches_in_flight(schedule: Schedule, worker: int, workers: int, count: int) -> list[int]:
    """Returns, for each stage of a worker, how many of `count` micro-batches a step have had forward but not backward, at
    most.

    In the order of its stages, just before its first backward. 1F1B: one for each stage from here on (Narayanan et al.,
    2019). Interleaved: the warm-up of Narayanan et al. (2021, section 2.2) in rounds of the number of workers, as PyTorch
    implements it. ZBV: two per worker in total, for any worker (Qi et al., 2024, section 6).
    """
    num_later_workers = workers - 1 - worker
    if schedule == "1f1b":
        return [min(count, num_later_workers + 1)]
    if schedule == "zbv":
        return [min(count, workers + num_later_workers + 1), min(count, worker)]
    turn = count // max(1, count // workers)
    num_forwards = min(turn + 2 * num_later_workers + 1, 2 * count)
    second = sum(number // turn % 2 for number in range(num_forwards))
    return [num_forwards - second, second]
