"""Which way multiplies fastest on this processor: every linear product of a model timed each way, and the choice from it.

    times = time_products({(768, 192): 1}, rows=2048, ways=("torch", "onednn", "bf16"))
    model.products.use({shape: fastest(each, 2048) for shape, each in times.items()})

A measurement lasts half a second, whatever the sizes: it takes fewer rows where those of a step would take longer.
"""

import time
from collections.abc import Iterable, Mapping

import torch

from raystride.model.linear import PYTORCH, Way, Ways, product

Shape = tuple[int, int]
"""Of a weight: (out, in)."""
Times = tuple[dict[Way, float], dict[Way, float], dict[Way, float]]
"""Seconds by way: of a product, of its gradient for the input, and of that for the weight."""

BUDGET_S = 0.5
LEAST_ROUNDS, ROUNDS = 2, 8
"""Times that each product is tried; the best counts, since all else is disturbance."""
FEWEST_ROWS = 64
WORTHWHILE = 0.97
"""A way other than PyTorch's own must take at most this share of its time."""
OURS_S = 30e-6
"""What our own operation with its gradient takes longer than PyTorch's, in Python, whatever the size."""


def time_products(shapes: Iterable[Shape], rows: int, ways: Iterable[Way], budget_s: float = BUDGET_S) -> dict[Shape, Times]:
    """Seconds of the three products of each weight (out, in) with an input (rows, in), by every one of the ways.

    Takes about `budget_s` seconds in all, and two rounds at least, since others on the machine disturb some of them.
    """
    began = time.perf_counter()
    shapes, ways = list(shapes), list(ways)
    rows = _rows_in_time(shapes, rows, len(ways), budget_s)
    found: dict[Shape, Times] = {shape: ({}, {}, {}) for shape in shapes}
    for turn in range(ROUNDS + 1):
        for shape in shapes:
            for times, (left, right) in zip(found[shape], _factors(shape, rows), strict=True):
                for way in ways:
                    seconds = _seconds(left, right, way)
                    # The first time makes what the library keeps.
                    times[way] = seconds if turn < 2 else min(times[way], seconds)
        if turn >= LEAST_ROUNDS and time.perf_counter() - began > budget_s * (turn + 1) / (turn + 2):
            break
    return found


def _rows_in_time(shapes: list[Shape], rows: int, ways: int, budget_s: float) -> int:
    """As many rows as leave time for some rounds, at the rate that a first product shows.

    No fewer than need be: what bfloat16 gains grows with the rows, and what it takes to round the weight does not.
    """
    if not shapes:
        return rows
    outputs, inputs = shapes[0]
    left, right = torch.ones(FEWEST_ROWS, inputs), torch.ones(outputs, inputs)
    seconds = min(_seconds(left, right, "torch") for _ in range(3))
    of_one = 3 * ways * sum(outputs * inputs for outputs, inputs in shapes) * seconds / (FEWEST_ROWS * outputs * inputs)
    return min(rows, max(FEWEST_ROWS, int(budget_s / 4 / of_one)))


def _factors(shape: Shape, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The factors of the three products, laid out as they are in a training."""
    outputs, inputs = shape
    x, weight, grad = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    return [(x, weight), (grad, weight.t()), (grad.t(), x.t())]


def _seconds(left: torch.Tensor, right: torch.Tensor, way: Way) -> float:
    # Of one thread its processor time, which is the same however busy the machine is.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    product(left, right, None, way)
    return clock() - began


def fastest(times: Times) -> Ways:
    """The fastest way of each of the three products, PyTorch's own where another gains little."""
    first, second, third = (min(each, key=lambda way: each[way] * (WORTHWHILE if way == "torch" else 1)) for each in times)
    chosen: Ways = (first, second, third)
    return chosen if _sum(times, chosen) + OURS_S <= WORTHWHILE * _sum(times, PYTORCH) else PYTORCH


def gain(times: Mapping[Shape, Times], chosen: Mapping[Shape, Ways], layers: Mapping[Shape, int]) -> float:
    """How many times faster all products of a model are than by PyTorch's own; `layers` counts those of each shape."""
    plain = sum(layers[shape] * _sum(times[shape], PYTORCH) for shape in chosen)
    ours = sum(layers[shape] * _sum(times[shape], chosen[shape]) for shape in chosen)
    return plain / ours if ours else 1.0


def _sum(times: Times, ways: Ways) -> float:
    return sum(each[way] for each, way in zip(times, ways, strict=True))
