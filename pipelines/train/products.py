"""Which way a run's linear products go on CPUs: named, kept from its last checkpoint, known of this machine, or measured.

    choice = choose_products(config.train, model, rows=4096, found=found, facts=job.facts, ...)
    header["bits"] = choice.bits                              # {"processor": ..., "products": {"768x192": ["bf16", ...]}}

The first worker decides for all, since workers that multiplied differently would not be repeatable. What was measured is
kept on the machine, so that its next run measures nothing. With `train.exact` nothing is measured: PyTorch's own products.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.linear import Products, Way, Ways, has_bf16, way_before_0_3
from raystride.model.products import Shape, Times, fastest, gain, time_products
from raystride.pipelines.config import Train
from raystride.pipelines.hardware.processor import processor_name
from raystride.pipelines.machine_table import machine_table
from raystride.pipelines.train.checkpoint import Found

WORDS = {"torch": "PyTorch", "onednn": "oneDNN", "bf16": "bf16"}
"""What people call the ways."""


@dataclass(frozen=True)
class Choice:
    """Which way the products of a training go, and why."""

    ways: dict[Shape, Ways] = field(default_factory=dict)
    """By the weight's shape (out, in); empty: all one way."""
    everywhere: Way = "torch"
    """The way of all other products."""
    gain: float | None = None
    """How many times faster they were measured to be than by PyTorch's own; None: not measured."""
    why: str = ""
    """What people should know of how it came about; empty: nothing."""

    @classmethod
    def of_bits(cls, bits: Mapping[str, Any]) -> "Choice":
        """The choice that a checkpoint's `bits` tell of."""
        found = bits.get("products")
        if not isinstance(found, dict):
            return cls(everywhere=found if found in WORDS else way_before_0_3())
        shapes = {name: tuple(map(int, name.split("x"))) for name in found}
        ways = {(shapes[name][0], shapes[name][1]): tuple(each) for name, each in found.items()}
        return cls(ways, gain=bits.get("products_gain"))

    @property
    def bits(self) -> dict[str, Any]:
        """What a checkpoint says of it, for the run to go on the same way."""
        named = {f"{outputs}x{inputs}": list(ways) for (outputs, inputs), ways in self.ways.items()}
        return {"processor": processor_name(), "products": named or self.everywhere, "products_gain": self.gain}

    @property
    def text(self) -> str:
        """How many of the products go which way, and what it gained."""
        counts = Counter(way for ways in self.ways.values() for way in ways)
        shares = ", ".join(f"{count} by {WORDS[way]}" for way, count in counts.most_common())
        gained = "" if self.gain is None else f"; together {self.gain:.2f} times as fast as by PyTorch alone"
        return (shares or f"by {WORDS[self.everywhere]}") + gained


def choose_products(
    train: Train,
    model: nn.Module,
    rows: int,
    *,
    found: Found | None,
    facts: Mapping[str, Any],
    rank: int,
    world: int,
    log: Callable[[str], None],
) -> Choice:
    """Has the products of a model on CPUs go the way that is best for inputs of about so many rows; all workers call it.

    `train.precision` is resolved. `facts` are what the driver says in every checkpoint: its `bits` decide with train.exact.
    """
    products = getattr(model, "products", None)
    if not isinstance(products, Products):
        return Choice()
    if not products.open:  # it is named, and holds already
        return Choice(everywhere=products.everywhere)
    if train.exact:
        choice = Choice.of_bits(facts.get("bits", {"products": "torch"}))
    else:
        before = found.manifest.get("bits", {}) if found else None
        chosen = [_kept_or_measured(products, rows, before, train.precision) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
        assert chosen[0] is not None
        choice = chosen[0]
    products.use(choice.ways, choice.everywhere)
    if choice.why:
        log(choice.why)
    if choice.ways:
        log(f"linear products {choice.text}")
    return choice


def use_products_of(model: nn.Module, found: Found) -> None:
    """Has the products of a model go the way of the training that it is from, where that was on a processor like this."""
    products, bits = getattr(model, "products", None), found.manifest.get("bits", {})
    if isinstance(products, Products) and products.open and bits.get("processor") == processor_name():
        choice = Choice.of_bits(bits)
        products.use(choice.ways, choice.everywhere)


def _kept_or_measured(products: Products, rows: int, before: Mapping[str, Any] | None, precision: str) -> Choice:
    why = ""
    if before is not None:
        if "products" not in before or before.get("processor") == processor_name():
            return Choice.of_bits(before)
        places = f"the run was on {before.get('processor')} before, and is on {processor_name()}"
        why = f"linear products are measured anew: {places}"
    ways: tuple[Way, ...] = ("torch", "onednn") if torch.backends.mkldnn.is_available() else ("torch",)
    if precision == "bf16" and has_bf16():
        ways += ("bf16",)
    times = times_here(list(products.layers), rows, ways)
    chosen = {shape: fastest(each) for shape, each in times.items()}
    return Choice(chosen, gain=round(gain(times, chosen, products.layers), 3), why=why)


def times_here(shapes: list[Shape], rows: int, ways: tuple[Way, ...]) -> dict[Shape, Times]:
    """Seconds of the products on this machine, measured where the machine's table lacks them."""
    with machine_table("products", threads=torch.get_num_threads()) as table:
        names = {shape: f"{shape[0]}x{shape[1]} {rows}" for shape in shapes}
        lacking = [shape for shape, name in names.items() if not _knows(table.get(name), ways)]
        for shape, times in time_products(lacking, rows, ways).items() if lacking else ():
            table[names[shape]] = list(times)
        return {shape: tuple({way: each[way] for way in ways} for each in table[name]) for shape, name in names.items()}  # type: ignore[misc]


def _knows(times: Any, ways: tuple[Way, ...]) -> bool:
    return isinstance(times, list) and len(times) == 3 and all(set(ways) <= set(each) for each in times)
