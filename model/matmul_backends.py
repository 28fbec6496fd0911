"""Choice of the fastest matmul backend on this CPU: times all linear products of a model with each backend, in turns.

    rounds = time_products({(768, 192): 4}, rows=2048, backends=("torch", "onednn", "bf16"))
    backend = choose_backend(rounds)                          # "bf16", if it was faster in every round
    model.products.set_backends({}, backend)

One thread multiplies, and its processor time counts: other processes change that little, and the answer is the same each
time. It is one answer for all products, whose gains add up; that of each by itself lies within the noise for some of them.
"""

import time
from collections.abc import Iterable, Mapping
from statistics import median

import torch

from raystride.model.linear import MatmulBackend, product

Shape = tuple[int, int]
"""Shape of a weight: (out, in)."""
Rounds = dict[MatmulBackend, list[float]]
"""Processor seconds of a step's products by backend, one figure a round."""

NUM_ROUNDS = 5
MAX_FLOP = 6e8
"""Floating-point operations of a backend in a round: half a second in all at some 20 GFLOP/s. Further rows are not timed."""
MIN_ROWS = 64
MIN_GAIN = 1.05
"""A backend replaces another one only if it is faster by this factor in every round."""
OVERHEAD_S = 30e-6
"""Python overhead of our operation with its gradient over PyTorch's, for any size."""


def time_products(layers: Mapping[Shape, int], rows: int, backends: Iterable[MatmulBackend]) -> Rounds:
    """Returns the processor seconds of a step's products in rounds, the backends in turns.

    `layers` counts the weights (out, in) of each shape; each has three products, with an input of `rows` rows and for the
    gradients of input and weight. PyTorch's number of threads is one meanwhile.
    """
    found: Rounds = {backend: [] for backend in backends}
    if not layers:
        return found
    flop = 6 * sum(outputs * inputs for outputs, inputs in layers)
    timed_rows = min(rows, max(MIN_ROWS, int(MAX_FLOP / flop)))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(NUM_ROUNDS + 1):
            for seconds in found.values():
                seconds.append(0.0)
            for shape, count in layers.items():
                for left, right in _build_factors(shape, timed_rows):
                    for backend, seconds in found.items():
                        seconds[-1] += count * _time_product(left, right, backend) * rows / timed_rows
                for backend, seconds in found.items():
                    seconds[-1] += 0.0 if backend == "torch" else count * OVERHEAD_S
    finally:
        torch.set_num_threads(num_threads)
    return {backend: seconds[1:] for backend, seconds in found.items()}  # the first round fills the library's caches


def _build_factors(shape: Shape, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the factors of the three products, laid out as in training."""
    outputs, inputs = shape
    x, weight, grad = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    return [(x, weight), (grad, weight.t()), (grad.t(), x.t())]


def _time_product(left: torch.Tensor, right: torch.Tensor, backend: MatmulBackend) -> float:
    began = time.thread_time()
    product(left, right, None, backend)
    return time.thread_time() - began


def choose_backend(rounds: Rounds) -> MatmulBackend:
    """Returns PyTorch's backend, or the last that was faster by `MIN_GAIN` than the one before it in every round."""
    chosen: MatmulBackend = "torch"
    for backend, seconds in rounds.items():
        if seconds and all(MIN_GAIN * other <= one for one, other in zip(rounds[chosen], seconds, strict=True)):
            chosen = backend
    return chosen


def compute_speedup(rounds: Rounds, backend: MatmulBackend) -> float:
    """Returns the speedup of all products of a model over PyTorch's own, the median of the rounds."""
    ratios = [plain / seconds for plain, seconds in zip(rounds["torch"], rounds[backend], strict=True) if seconds]
    return median(ratios) if ratios else 1.0
