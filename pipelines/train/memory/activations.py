"""Peak memory of a forward and backward besides parameters, their gradients and the optimiser's state.

A network is described as a `Network` (`networks` builds ours): its blocks, the bytes that each saves for its backward, and
the parts of that backward in order. The peak is at one of these moments; `list_moments` lists them with the gradients that
exist by then:

    loss          all blocks' saved tensors, and those of the head and the loss
    block         saved tensors of all blocks up to this one, the stream's gradient, and the part that is differentiated
    embedding     the gradients of the parameters ahead of the blocks, made last

With activation checkpointing a block's saved tensors exist only while its backward runs; before that only the kept ones do.

    found = list_moments(network, arithmetic, checkpointing="none")
    max(moment.activations for moment in found)               # bytes
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

FP32 = 4


@dataclass(frozen=True)
class Arithmetic:
    """Bytes per number of each kind of tensor, and whether our kernels compute them."""

    stream: int = FP32
    """Bytes of a number of the residual stream."""
    matmul: int = FP32
    """Bytes of a number that matrix products read and write."""
    kernels: bool = False
    """Our Triton kernels run."""
    mask: int = FP32
    """Bytes of a number of a dropout mask."""

    @property
    def autocasts(self) -> bool:
        """True under autocast: matrix products work on copies of inputs and weights."""
        return self.stream != self.matmul


@dataclass(frozen=True)
class Moment:
    """A candidate for the peak of memory in a step."""

    activations: float
    """Bytes other than parameters, their gradients and the optimiser's state."""
    ready_gradients: float = 0.0
    """Numbers of the gradients that this backward has made so far."""
    computing_gradients: float = 0.0
    """Numbers of the gradients that it is just making, held besides gradients that exist already."""
    phase: Literal["forward", "loss", "block", "embedding"] = "loss"
    """`forward`: of the last block; the others as above."""
    num_blocks_done: int = 0
    """Blocks whose backward is over."""


@dataclass(frozen=True)
class PartMemory:
    """Memory of one part of a block's backward."""

    saved_bytes: float
    """Bytes that the forward saved for it."""
    extra: float
    """Peak of the bytes that it adds while all saved ones still exist."""
    num_parameters: int
    """Parameters whose gradients it makes ..."""
    computing_gradients: int
    """... and those whose gradient it makes at its peak."""


@dataclass(frozen=True)
class BlockMemory:
    """Memory of the unit of `strategies.recompute` and FSDP: an item of the network's `ModuleList`s."""

    input: float
    """Bytes of the input, all that is kept if the block is recomputed."""
    matmul_outputs: float
    """Bytes that are kept if products and attention are not recomputed."""
    parts: tuple[PartMemory, ...]
    """In the order of the backward."""
    gradient: float
    """Bytes of the stream's gradient during its backward."""
    num_matmul_weights: int
    """Numbers of its matrices, copied by autocast."""
    extra_kept: float = 0.0
    """Bytes kept until its backward in any case, such as those between it and the next block."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the block."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def saved_bytes(self) -> float:
        """Bytes that its forward saves."""
        return sum(part.saved_bytes for part in self.parts)

    def bytes_kept(self, checkpointing: str) -> float:
        """Returns the bytes held from its forward to its backward."""
        return {"none": self.saved_bytes, "selective": self.matmul_outputs, "full": self.input}[
            checkpointing
        ] + self.extra_kept


@dataclass(frozen=True)
class Network:
    """A network with the micro-batch that it computes."""

    sizes: list[int]
    """Numbers of each parameter, in the network's order."""
    blocks: list[BlockMemory]
    """In the order of the forward."""
    embedding_saved: float
    """Bytes that the layers before the blocks save."""
    loss: list[Moment]
    """Moments above the blocks, from the forward of the head to the backward of the loss."""
    final_moment: Moment
    """The end of the backward, when the gradients of the layers before the blocks are made."""
    head: int = 0
    """Numbers of a head whose gradient is made before that of the blocks ..."""
    deferred_gradient: float = 0.0
    """... and bytes of the gradient of a tied head, held until the embedding's gradient is made."""
    optimizer_moments: float | None = None
    """Numbers that an optimiser of the user's own keeps for a parameter, as measured."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(self.sizes)


def list_moments(network: Network, arithmetic: Arithmetic, checkpointing: str) -> list[Moment]:
    """Returns the candidate moments for the peak of memory in a micro-batch."""
    bytes_kept = [block.bytes_kept(checkpointing) for block in network.blocks]
    below = network.embedding_saved + sum(bytes_kept)
    copies = _autocast_copy_bytes(network.blocks, arithmetic)
    moments = [replace(moment, activations=below + copies + moment.activations) for moment in network.loss]
    if network.blocks:
        moments.append(Moment(below - bytes_kept[-1], phase="forward"))
    ready_gradients = network.head
    for num_blocks_done, block in enumerate(reversed(network.blocks)):
        num_blocks_left = len(network.blocks) - num_blocks_done
        # Autocast keeps its copies of weights until its block ends; with recomputation only those of one block exist.
        copies = _autocast_copy_bytes(network.blocks[:num_blocks_left] if checkpointing == "none" else [block], arithmetic)
        held_bytes = (
            below
            + block.saved_bytes
            + block.extra_kept
            - bytes_kept[num_blocks_left - 1]
            + copies
            + network.deferred_gradient
            + block.gradient
        )
        for part in block.parts:
            moments.append(
                Moment(
                    held_bytes + part.extra,
                    ready_gradients + part.computing_gradients,
                    part.computing_gradients,
                    "block",
                    num_blocks_done,
                )
            )
            held_bytes -= part.saved_bytes
            ready_gradients += part.num_parameters
        below -= bytes_kept[num_blocks_left - 1]
    return [*moments, network.final_moment]


def _autocast_copy_bytes(blocks: Iterable[BlockMemory], arithmetic: Arithmetic) -> float:
    return arithmetic.matmul * sum(block.num_matmul_weights for block in blocks) if arithmetic.autocasts else 0.0
