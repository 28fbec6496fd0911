"""How much memory a worker will need, told before anything starts.

Parameters, gradients and AdamW's two moments are counted; activations are estimated after Korthikanti et al. (2022), eq. 2,
without the attention matrix, which a fused attention does not keep: 34 C bytes a token and layer at 2 bytes a number.

    need = estimate(config.model, vocabulary_size=4096, tokens=8 * 128, precision="fp32", moments=2)
    need.total                                                # bytes
"""

from dataclasses import dataclass

from model.shape import DecoderShape, count_parameters

FRAMEWORK_BYTES = 400 * 2**20
"""What a process with PyTorch loaded takes before it holds a model, measured on CPUs with PyTorch 2.13."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    framework: float = FRAMEWORK_BYTES

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.framework


def estimate(
    shape: DecoderShape, *, vocabulary_size: int, tokens: int, precision: str, moments: int, gradients: int = 1
) -> MemoryEstimate:
    """Bytes of a worker that holds a whole decoder and runs `tokens` tokens in one forward and backward.

    `moments` is the optimiser's numbers a parameter: 2 for AdamW, 1 for SGD with momentum, 0 without. `gradients`: how many
    sums of gradients are held at a time.
    """
    parameters = 4.0 * count_parameters(shape, vocabulary_size)
    width = 2 if precision == "bf16" else 4
    blocks = 34 / 2 * width * shape.width * shape.layers * tokens
    logits = (width + 4 + 4) * vocabulary_size * tokens  # as computed, in fp32 for the loss, and their gradient
    return MemoryEstimate(parameters, gradients * parameters, moments * parameters, blocks + logits)
