"""What a decoder must be told of itself; `pipelines.config.Model` has all of it, so the model needs no import from there.

    def build(shape: DecoderShape) -> Decoder: ...            # any object with these attributes will do
"""

from typing import Literal, Protocol


class DecoderShape(Protocol):
    """Sizes and choices of a decoder; `pipelines.config.Model` documents each."""

    @property
    def flavour(self) -> Literal["gpt2", "llama"]: ...  # noqa: D102
    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def heads(self) -> int: ...  # noqa: D102
    @property
    def kv_heads(self) -> int: ...  # noqa: D102
    @property
    def width(self) -> int: ...  # noqa: D102
    @property
    def feed_forward(self) -> int: ...  # noqa: D102
    @property
    def context(self) -> int: ...  # noqa: D102
    @property
    def dropout(self) -> float: ...  # noqa: D102
    @property
    def bias(self) -> bool: ...  # noqa: D102
    @property
    def rope_theta(self) -> float: ...  # noqa: D102
    @property
    def linear(self) -> str: ...  # noqa: D102
