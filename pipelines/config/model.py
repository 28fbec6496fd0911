"""Settings of the network."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pipelines.config.section import Section, setting
from pipelines.files import absolute


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """A transformer in the flavour of GPT-2, of Llama or of its first paper, or a convolutional network."""

    name: ClassVar[str] = "model"

    flavour: Literal["gpt2", "llama", "original"] = setting("gpt2", fixed=True)
    """`gpt2`: LayerNorm, learned positions, GELU, tied embeddings. `llama`: RMSNorm, RoPE, SwiGLU, grouped heads.

    `original` (Vaswani et al., 2017): LayerNorm after each addition, sinusoidal positions, ReLU, biases, tied embeddings."""
    norm: Literal["auto", "pre", "post"] = setting("auto", fixed=True)
    """Where a block normalises: before its parts (`pre`), or after each addition (`post`); `auto`: as the flavour has it."""
    layers: int = setting(4, at_least=1, fixed=True)
    """Transformer blocks; of a translator, those of its decoder."""
    encoder_layers: int = setting(0, at_least=0, fixed=True)
    """Blocks of a translator's encoder; 0: as many as `layers`."""
    heads: int = setting(4, at_least=1, fixed=True)
    """Query heads of each attention."""
    kv_heads: int = setting(0, at_least=0, fixed=True)
    """Key and value heads (grouped-query attention); 0: as many as query heads."""
    width: int = setting(128, at_least=1, fixed=True)
    """Width of the residual stream."""
    feed_forward: int = setting(0, at_least=0, fixed=True)
    """Hidden width of the feed-forward; 0: 4 x width, or 8/3 x width rounded up to a multiple of 64 (llama)."""
    context: int = setting(128, at_least=1, fixed=True)
    """Tokens that a sample predicts, and the longest attention."""
    dropout: float = setting(0.0, at_least=0, below=1, fixed=True)
    """Share of activations dropped in training, in embeddings, attention and residual branches."""
    bias: bool = setting(False, fixed=True)
    """Biases in linear layers and LayerNorm; `original` always has them."""
    rope_theta: float = setting(10000.0, above=0, fixed=True)
    """Base of the rotary frequencies."""
    pooling: Literal["mean", "first", "attention"] = setting("mean", fixed=True)
    """What a classifier reads of a text: the mean over its tokens, its first token, or a mean with learned weights."""
    channels: tuple[int, ...] = setting((16, 32, 64), at_least=1, fixed=True)
    """Channels of each convolution of a convolutional network."""
    hidden: tuple[int, ...] = setting((512, 128), at_least=1, fixed=True)
    """Widths of a convolutional network's fully connected layers, without the last, which has one number a class."""
    init_from: str | None = setting(None, fixed=True)
    """Folder or URI of a Hugging Face model, Llama or GPT-2, in safetensors, whose weights a new run starts with.

    The other settings must describe that model (what differs is named), and `tokenizer.file` should be the one beside it."""
    kernels: Literal["auto", "triton", "torch"] = setting("auto")
    """Attention and the other hot operations: our Triton kernels, or PyTorch's own; `auto` takes Triton on GPUs.

    `triton` without a GPU needs TRITON_INTERPRET=1, which runs kernels in Triton's interpreter: for proofs, very slowly."""
    linear: Literal["auto", "torch", "onednn"] = setting("auto")
    """Matrix products on CPUs: PyTorch's default, or oneDNN, which is faster on AMD; `auto` looks at the processor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise self.error("width", f"must be a multiple of model.heads, {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise self.error("kv_heads", f"must divide model.heads, {self.heads}")
        if self.flavour == "llama" and self.width // self.heads % 2:
            raise self.error("width", "must give every head an even size, which rotary positions need")
        if self.flavour == "original" and self.width % 2:
            raise self.error("width", "must be even, as sinusoidal positions are pairs")
        if self.flavour == "llama" and self.bias:
            raise self.error("bias", "must be false with model.flavour `llama`, whose layers have none")
        if self.init_from:
            # Workers have other working directories than the one in which this was typed.
            object.__setattr__(self, "init_from", absolute(self.init_from))
