"""Choice of the fastest matmul backend on this CPU: times each linear product of a model with each backend.

    times = time_products({(768, 192): 1}, rows=2048, backends=("torch", "onednn", "bf16"))
    model.products.set_backends({shape: choose_fastest(shape_times, 2048) for shape, shape_times in times.items()})

A measurement takes half a second for any sizes: it uses fewer rows if those of a step would take longer.
"""

import time
from collections.abc import Iterable, Mapping

import torch

from raystride.model.linear import ALL_TORCH, MatmulBackend, PassBackends, product

Shape = tuple[int, int]
"""Shape of a weight: (out, in)."""
Times = tuple[dict[MatmulBackend, float], dict[MatmulBackend, float], dict[MatmulBackend, float]]
"""Seconds by backend: of a product, of its gradient for the input, and of that for the weight."""

BUDGET_S = 0.5
MIN_ROUNDS, ROUNDS = 2, 8
"""Rounds of each product; the best counts, since all else is disturbance."""
MIN_ROWS = 64
MAX_TIME_RATIO = 0.97
"""A backend other than PyTorch's own must take at most this fraction of its time."""
OVERHEAD_S = 30e-6
"""Python overhead of our operation with its gradient over PyTorch's, for any size."""


def time_products(
    shapes: Iterable[Shape], rows: int, backends: Iterable[MatmulBackend], budget_s: float = BUDGET_S
) -> dict[Shape, Times]:
    """Returns seconds of the three products of each weight (out, in) with an input (rows, in), for every backend.

    Takes about `budget_s` seconds in all, and at least two rounds, since other processes disturb some of them.
    """
    began = time.perf_counter()
    shapes, backends = list(shapes), list(backends)
    rows = _limit_rows(shapes, rows, len(backends), budget_s)
    found: dict[Shape, Times] = {shape: ({}, {}, {}) for shape in shapes}
    for round_number in range(ROUNDS + 1):
        for shape in shapes:
            for times, (left, right) in zip(found[shape], _build_factors(shape, rows), strict=True):
                for backend in backends:
                    seconds = _time_product(left, right, backend)
                    # The first round fills the library's caches.
                    times[backend] = seconds if round_number < 2 else min(times[backend], seconds)
        if round_number >= MIN_ROUNDS and time.perf_counter() - began > budget_s * (round_number + 1) / (round_number + 2):
            break
    return found


def _limit_rows(shapes: list[Shape], rows: int, backends: int, budget_s: float) -> int:
    """Returns as many rows as leave time for some rounds, at the rate of a first product.

    As many as possible: the gain of bfloat16 grows with the rows, and the cost of rounding the weight does not.
    """
    if not shapes:
        return rows
    outputs, inputs = shapes[0]
    left, right = torch.ones(MIN_ROWS, inputs), torch.ones(outputs, inputs)
    seconds = min(_time_product(left, right, "torch") for _ in range(3))
    of_one = 3 * backends * sum(outputs * inputs for outputs, inputs in shapes) * seconds / (MIN_ROWS * outputs * inputs)
    return min(rows, max(MIN_ROWS, int(budget_s / 4 / of_one)))


def _build_factors(shape: Shape, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the factors of the three products, laid out as in training."""
    outputs, inputs = shape
    x, weight, grad = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    return [(x, weight), (grad, weight.t()), (grad.t(), x.t())]


def _time_product(left: torch.Tensor, right: torch.Tensor, backend: MatmulBackend) -> float:
    # With one thread its CPU time, which does not depend on the load of the machine.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    product(left, right, None, backend)
    return clock() - began


def choose_fastest(times: Times) -> PassBackends:
    """Returns the fastest backend of each of the three products, PyTorch's own if another gains little."""
    first, second, third = (
        min(pass_times, key=lambda backend: pass_times[backend] * (MAX_TIME_RATIO if backend == "torch" else 1))
        for pass_times in times
    )
    chosen: PassBackends = (first, second, third)
    return (
        chosen
        if _total_seconds(times, chosen) + OVERHEAD_S <= MAX_TIME_RATIO * _total_seconds(times, ALL_TORCH)
        else ALL_TORCH
    )


def compute_speedup(
    times: Mapping[Shape, Times], chosen: Mapping[Shape, PassBackends], layers: Mapping[Shape, int]
) -> float:
    """Returns the speedup of all products of a model over PyTorch's own; `layers` counts those of each shape."""
    plain = sum(layers[shape] * _total_seconds(times[shape], ALL_TORCH) for shape in chosen)
    ours = sum(layers[shape] * _total_seconds(times[shape], chosen[shape]) for shape in chosen)
    return plain / ours if ours else 1.0


def _total_seconds(times: Times, backends: PassBackends) -> float:
    return sum(pass_times[backend] for pass_times, backend in zip(times, backends, strict=True))
