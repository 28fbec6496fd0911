"""What a forward and backward hold besides parameters, their gradients and the optimiser's state, at their worst.

A network tells of itself what `Network` asks for (`networks` has ours): its blocks, what each saves for its backward, and in
which parts that backward goes. The most is held at one of these moments, which `moments` lists with the gradients that have
come to be by then:

    loss          all blocks' saved tensors, and what the head and the loss hold
    block         those of all blocks up to this one, the stream's gradient, and what one of its parts differentiates
    embedding     what the gradients of everything ahead of the blocks take, which come last

With activation checkpointing a block's saved tensors exist while its backward runs, and before that only what is kept.

    held = moments(network, arithmetic, checkpointing="none")
    max(moment.activations for moment in held)                # bytes
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

FP32 = 4


@dataclass(frozen=True)
class Arithmetic:
    """What numbers are made of, and by what means they are computed."""

    stream: int = FP32
    """Bytes of a number of the residual stream."""
    product: int = FP32
    """Bytes of a number that products read and write."""
    kernels: bool = False
    """Our Triton kernels run."""
    mask: int = FP32
    """Bytes of a dropout mask's number."""

    @property
    def cast(self) -> bool:
        """Autocast: products work on copies of inputs and weights."""
        return self.stream != self.product


@dataclass(frozen=True)
class Moment:
    """A point of a step at which much is held."""

    activations: float
    """Bytes that are no parameter, no gradient of one and no state of the optimiser."""
    arisen: float = 0.0
    """Numbers of the gradients that this backward has made so far."""
    making: float = 0.0
    """Those of them that it is just making, which lie beside gradients that are there already."""
    place: Literal["forward", "loss", "block", "embedding"] = "loss"
    """Where: in the forward of the last block, or as above."""
    done: int = 0
    """Blocks whose backward is over."""


@dataclass(frozen=True)
class PartMemory:
    """A part of a block's backward."""

    saved: float
    """Bytes that the forward saved for it."""
    working: float
    """Bytes that it adds at most, with all of these still there."""
    numbers: int
    """Parameters of which it makes gradients ..."""
    making: int
    """... and of the one that it makes when it holds the most."""


@dataclass(frozen=True)
class BlockMemory:
    """What `strategies.recompute` and FSDP take for one piece: an item of the network's `ModuleList`s."""

    input: float
    """Bytes of what comes in, all that is kept where the block is computed again."""
    products: float
    """Bytes that are kept where products and attention are not computed again."""
    parts: tuple[PartMemory, ...]
    """In the order of the backward."""
    gradient: float
    """Bytes of the stream's gradient during its backward."""
    matrices: int
    """Numbers of its matrices, which autocast copies."""
    beside: float = 0.0
    """Bytes kept until its backward in any case, as what lies between it and the next block."""

    @property
    def numbers(self) -> int:
        """How many parameters the block has."""
        return sum(part.numbers for part in self.parts)

    @property
    def saved(self) -> float:
        """Bytes that its forward saves."""
        return sum(part.saved for part in self.parts)

    def kept(self, checkpointing: str) -> float:
        """Bytes that are there from its forward to its backward."""
        return {"none": self.saved, "selective": self.products, "full": self.input}[checkpointing] + self.beside


@dataclass(frozen=True)
class Network:
    """A network and the micro-batch that it is given."""

    sizes: list[int]
    """Numbers of each parameter, in the network's order."""
    blocks: list[BlockMemory]
    """In the order of the forward."""
    front: float
    """Bytes that what comes before the blocks saves."""
    loss: list[Moment]
    """What lies on top of the blocks, from the forward of the head to the backward of the loss."""
    ending: Moment
    """The last of the backward, when the gradients of all that comes before the blocks are made."""
    head: int = 0
    """Numbers of a head whose gradient is there before that of the blocks ..."""
    waiting: float = 0.0
    """... and bytes of the gradient of a shared one, which waits until its other use has come to its own."""

    @property
    def count(self) -> int:
        """How many parameters the network has."""
        return sum(self.sizes)


def moments(network: Network, arithmetic: Arithmetic, checkpointing: str) -> list[Moment]:
    """The moments of a micro-batch at which the most may be held."""
    kept = [block.kept(checkpointing) for block in network.blocks]
    below = network.front + sum(kept)
    copies = _copies(network.blocks, arithmetic)
    found = [replace(each, activations=below + copies + each.activations) for each in network.loss]
    found.append(Moment(below - kept[-1], place="forward"))
    arisen = network.head
    for done, block in enumerate(reversed(network.blocks)):
        left = len(network.blocks) - done
        # Autocast keeps its copies of weights until its block ends; computed again, only those of one block are there.
        copies = _copies(network.blocks[:left] if checkpointing == "none" else [block], arithmetic)
        held = below + block.saved + block.beside - kept[left - 1] + copies + network.waiting + block.gradient
        for part in block.parts:
            found.append(Moment(held + part.working, arisen + part.making, part.making, "block", done))
            held -= part.saved
            arisen += part.numbers
        below -= kept[left - 1]
    return [*found, network.ending]


def _copies(blocks: Iterable[BlockMemory], arithmetic: Arithmetic) -> float:
    return arithmetic.product * sum(block.matrices for block in blocks) if arithmetic.cast else 0.0
