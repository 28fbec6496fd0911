"""Chooses the CPU matmul backend of a run's linear layers: configured, from its last checkpoint, cached, or measured.

    choice = choose_matmul_backends(config.train, model, rows=4096, found=found, facts=job.facts, ...)
    header["bits"] = choice.bits                              # {"processor": ..., "products": {"768x192": ["bf16", ...]}}

The first worker decides for all, since workers with different backends would not be repeatable. Measurements are cached on
the machine, so its next run measures nothing. With `train.exact` nothing is measured: PyTorch's own products.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.linear import MatmulBackend, PassBackends, Products, has_bf16, legacy_backend
from raystride.model.matmul_backends import Shape, Times, choose_fastest, compute_speedup, time_products
from raystride.pipelines.config import TrainConfig
from raystride.pipelines.system.limits import processor_name
from raystride.pipelines.system.machine_table import machine_table
from raystride.pipelines.train.checkpoint.manager import ValidCheckpoint

DISPLAY_NAMES = {"torch": "PyTorch", "onednn": "oneDNN", "bf16": "bf16"}
"""Names of the backends for people."""


@dataclass(frozen=True)
class MatmulChoice:
    """The matmul backends of a training, and the reason for them."""

    ways: dict[Shape, PassBackends] = field(default_factory=dict)
    """Backends by the weight's shape (out, in); empty: one backend everywhere."""
    everywhere: MatmulBackend = "torch"
    """The backend of all other products."""
    gain: float | None = None
    """Measured speed-up over PyTorch's own products; None: not measured."""
    reason: str = ""
    """Why it was chosen, for people; "": nothing to report."""

    @classmethod
    def from_bits(cls, bits: Mapping[str, Any]) -> "MatmulChoice":
        """Returns the choice stored in a checkpoint's `bits`."""
        found = bits.get("products")
        if not isinstance(found, dict):
            return cls(everywhere=found if found in DISPLAY_NAMES else legacy_backend())
        shapes = {name: tuple(map(int, name.split("x"))) for name in found}
        ways = {(shapes[name][0], shapes[name][1]): tuple(ways_of_shape) for name, ways_of_shape in found.items()}
        return cls(ways, gain=bits.get("products_gain"))

    @property
    def bits(self) -> dict[str, Any]:
        """The entries of a checkpoint's `bits`, from which the run resumes with the same backends."""
        named = {f"{outputs}x{inputs}": list(ways) for (outputs, inputs), ways in self.ways.items()}
        return {"processor": processor_name(), "products": named or self.everywhere, "products_gain": self.gain}

    @property
    def description(self) -> str:
        """The number of products per backend, and the speed-up."""
        counts = Counter(way for ways in self.ways.values() for way in ways)
        shares = ", ".join(f"{count} by {DISPLAY_NAMES[way]}" for way, count in counts.most_common())
        gained = "" if self.gain is None else f"; together {self.gain:.2f} times as fast as by PyTorch alone"
        return (shares or f"by {DISPLAY_NAMES[self.everywhere]}") + gained


def choose_matmul_backends(
    train: TrainConfig,
    model: nn.Module,
    rows: int,
    *,
    found: ValidCheckpoint | None,
    facts: Mapping[str, Any],
    rank: int,
    world: int,
    log: Callable[[str], None],
) -> MatmulChoice:
    """Sets the best backends of a model's products on CPUs for inputs of about `rows` rows; all workers call it together.

    `train.precision` is resolved. `facts` are the driver's entries in every checkpoint: its `bits` decide with train.exact.
    """
    products = getattr(model, "products", None)
    if not isinstance(products, Products):
        return MatmulChoice()
    if not products.is_automatic:  # configured, and already in effect
        return MatmulChoice(everywhere=products.fallback)
    if train.exact:
        choice = MatmulChoice.from_bits(facts.get("bits", {"products": "torch"}))
    else:
        before = found.manifest.get("bits", {}) if found else None
        chosen = [_reuse_or_measure(products, rows, before, train.precision) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
        assert chosen[0] is not None
        choice = chosen[0]
    products.set_backends(choice.ways, choice.everywhere)
    if choice.reason:
        log(choice.reason)
    if choice.ways:
        log(f"linear products {choice.description}")
    return choice


def use_saved_backends(model: nn.Module, found: ValidCheckpoint) -> None:
    """Sets the backends of a finished training for its model, if it ran on a processor like this."""
    products, bits = getattr(model, "products", None), found.manifest.get("bits", {})
    if isinstance(products, Products) and products.is_automatic and bits.get("processor") == processor_name():
        choice = MatmulChoice.from_bits(bits)
        products.set_backends(choice.ways, choice.everywhere)


def _reuse_or_measure(products: Products, rows: int, before: Mapping[str, Any] | None, precision: str) -> MatmulChoice:
    reason = ""
    if before is not None:
        if "products" not in before or before.get("processor") == processor_name():
            return MatmulChoice.from_bits(before)
        processors = f"the run was on {before.get('processor')} before, and is on {processor_name()}"
        reason = f"linear products are measured anew: {processors}"
    ways: tuple[MatmulBackend, ...] = ("torch", "onednn") if torch.backends.mkldnn.is_available() else ("torch",)
    if precision == "bf16" and has_bf16():
        ways += ("bf16",)
    times = measure_times(list(products.layers), rows, ways)
    chosen = {shape: choose_fastest(shape_times) for shape, shape_times in times.items()}
    return MatmulChoice(chosen, gain=round(compute_speedup(times, chosen, products.layers), 3), reason=reason)


def measure_times(shapes: list[Shape], rows: int, ways: tuple[MatmulBackend, ...]) -> dict[Shape, Times]:
    """Returns the seconds of the products on this machine; measures those that the machine's table lacks."""
    with machine_table("products", threads=torch.get_num_threads()) as table:
        names = {shape: f"{shape[0]}x{shape[1]} {rows}" for shape in shapes}
        missing = [shape for shape, name in names.items() if not _has_times(table.get(name), ways)]
        for shape, times in time_products(missing, rows, ways).items() if missing else ():
            table[names[shape]] = list(times)
        return {shape: tuple({w: times[w] for w in ways} for times in table[name]) for shape, name in names.items()}  # type: ignore[misc]


def _has_times(times: Any, ways: tuple[MatmulBackend, ...]) -> bool:
    return isinstance(times, list) and len(times) == 3 and all(set(ways) <= set(pass_times) for pass_times in times)
