"""Chooses the CPU matmul backend of a run's linear layers: configured, from its last checkpoint, cached, or measured.

    choice = choose_matmul_backends(config.train, model, rows=4096, chosen_before=None, facts=job.facts, ...)
    header["bits"] = choice.bits                              # {"processor": ..., "products": "bf16", "products_gain": 1.7}

The first worker decides for all, since workers with different backends would not be repeatable. What was chosen is kept for
the machine and in the storage, so a processor's next run has the same. With `train.exact` nothing is measured: PyTorch's
own products. Runs of 0.3 chose for each product, and go on with that.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raystride.model.linear import MatmulBackend, PassBackends, Products, has_bf16, legacy_backend
from raystride.model.matmul_backends import Shape, choose_backend, compute_speedup, time_products
from raystride.pipelines.config import TrainConfig
from raystride.pipelines.system.limits import processor_name
from raystride.pipelines.system.machine_table import machine_table
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import ValidCheckpoint

DISPLAY_NAMES = {"torch": "PyTorch", "onednn": "oneDNN", "bf16": "bf16"}
"""Names of the backends for people."""


@dataclass(frozen=True)
class MatmulChoice:
    """The matmul backends of a training, and the reason for them."""

    ways: dict[Shape, PassBackends] = field(default_factory=dict)
    """Backends by the weight's shape (out, in), of a run of 0.3; empty: one backend everywhere."""
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
            return cls(everywhere=found if found in DISPLAY_NAMES else legacy_backend(), gain=bits.get("products_gain"))
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
        return (shares or f"by {DISPLAY_NAMES[self.everywhere]}") + ("" if self.is_plain else gained)

    @property
    def is_plain(self) -> bool:
        """Whether all products are PyTorch's own."""
        return not self.ways and self.everywhere == "torch"


def choose_matmul_backends(
    train: TrainConfig,
    model: nn.Module,
    rows: int,
    *,
    chosen_before: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
    storage: Folder,
    rank: int,
    world: int,
    log: Callable[[str], None],
) -> MatmulChoice:
    """Sets the best backend of a model's products on CPUs for inputs of about `rows` rows; all workers call it together.

    `train.precision` is resolved. `chosen_before` has the `bits` of the run's checkpoint, or of the run that it repeats.
    `facts` are the driver's entries in every checkpoint: their `bits` decide with train.exact. `storage` keeps choices, as
    the machine does.
    """
    products = getattr(model, "products", None)
    if not isinstance(products, Products):
        return MatmulChoice()
    if not products.is_automatic:  # configured, and already in effect
        return MatmulChoice(everywhere=products.fallback)
    if train.exact:
        choice = MatmulChoice.from_bits(facts.get("bits", {"products": "torch"}))
    else:
        chosen = [_reuse_or_measure(products, rows, chosen_before, train.precision, storage) if rank == 0 else None]
        if world > 1:
            dist.broadcast_object_list(chosen, src=0, device=torch.device("cpu"))
        assert chosen[0] is not None
        choice = chosen[0]
    products.set_backends(choice.ways, choice.everywhere)
    if choice.reason:
        log(choice.reason)
    if choice.gain is not None:
        log(f"linear products {choice.description}")
    return choice


def use_saved_backends(model: nn.Module, found: ValidCheckpoint) -> None:
    """Sets the backends of a finished training for its model, if it ran on a processor like this."""
    products, bits = getattr(model, "products", None), found.manifest.get("bits", {})
    if isinstance(products, Products) and products.is_automatic and bits.get("processor") == processor_name():
        choice = MatmulChoice.from_bits(bits)
        products.set_backends(choice.ways, choice.everywhere)


def _reuse_or_measure(
    products: Products, rows: int, before: Mapping[str, Any] | None, precision: str, storage: Folder
) -> MatmulChoice:
    reason = ""
    if before is not None:
        if "products" not in before or before.get("processor") == processor_name():
            return MatmulChoice.from_bits(before)
        processors = f"those before were on {before.get('processor')}, and this is {processor_name()}"
        reason = f"linear products are measured anew: {processors}"
    backends: tuple[MatmulBackend, ...] = ("torch", "onednn") if torch.backends.mkldnn.is_available() else ("torch",)
    if precision == "bf16" and has_bf16():
        backends += ("bf16",)
    return replace(_choose_once(products.layers, rows, backends, storage), reason=reason)


def _choose_once(
    layers: Mapping[Shape, int], rows: int, backends: tuple[MatmulBackend, ...], storage: Folder
) -> MatmulChoice:
    """Returns the choice for these products on this machine; measures and keeps it if there is none yet."""
    shapes = " ".join(f"{count}x{outputs}x{inputs}" for (outputs, inputs), count in sorted(layers.items()))
    name = f"{shapes} {rows} {'+'.join(backends)}"
    with machine_table("backends", storage) as table:
        if not (isinstance(found := table.get(name), list) and found[:1] and found[0] in backends):
            rounds = time_products(layers, rows, backends)
            chosen = choose_backend(rounds)
            found = table[name] = [chosen, round(compute_speedup(rounds, chosen), 3)]
    return MatmulChoice(everywhere=found[0], gain=found[1])
