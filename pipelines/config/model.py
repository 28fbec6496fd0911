"""Settings of the network."""

from dataclasses import dataclass
from os.path import exists
from typing import ClassVar, Literal

from raystride.model.shape import ENCODERS
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.system.hub import is_hub_name
from raystride.pipelines.system.storage.folder import absolute_uri

ROTATED = ("llama", "modernbert")
"""Architectures with rotary positions, and without biases."""
LLAMA_ONLY = (
    "window_rope_theta", "nope_layers", "rotary_fraction", "rope_factor", "out_bias", "gate", "scaled_embedding",
    "experts", "qk_norm_joint",
)  # fmt: skip
"""Settings of `architecture llama` alone."""
DECODERS_ONLY = (
    "window", "nope_layers", "rotary_fraction", "rope_factor", "out_bias", "query_pre_attn_scalar", "gate",
    "scaled_embedding", "logit_softcap", "experts", "qk_norm_joint",
)  # fmt: skip
"""Settings of decoders alone."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Architecture and size of the network: a transformer (GPT-2, Llama, BERT, the original) or a convolutional network."""

    name: ClassVar[str] = "model"

    architecture: Literal["gpt2", "llama", "original", "bert", "modernbert"] = setting(
        "gpt2", fixed=True, was="model.flavour", renamed="0.3", also="model_type arch model_name"
    )
    """Architecture of the network. `gpt2`: LayerNorm, learned positions, GELU, tied embeddings. `llama`: RMSNorm, RoPE,
    SwiGLU, grouped-query attention.

    `original` (Vaswani et al., 2017): LayerNorm after each addition, sinusoidal positions, ReLU, biases, tied embeddings.

    Encoders, for `classification` only, with LayerNorm also after the embedding. `bert` (Devlin et al., 2019; RoBERTa,
    DistilBERT): LayerNorm after each addition, learned positions, GELU, biases. `modernbert` (Warner et al., 2024): RoPE,
    GeGLU, no biases, layers with a bidirectional sliding window."""
    family: Literal[
        "auto", "gpt2", "llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "gemma2", "gemma3_text",
        "mixtral", "qwen3_moe", "olmoe",
        "bert", "roberta", "distilbert", "modernbert",
    ] = setting("auto", since="0.3")  # fmt: skip
    """Hugging Face `model_type` of the base. It defines the names of tensors when reading and writing. `auto`: that of the
    base's folder; without a base, the simplest family that can represent the network."""
    norm: Literal["auto", "pre", "post", "sandwich"] = setting("auto", fixed=True)
    """Position of the norms in a block. `pre`: before attention and feed-forward. `post`: after each addition. `auto`: that
    of the architecture.

    `sandwich`: before attention and feed-forward, and on the output of each before the addition, as in Gemma 2 and 3."""
    layers: int = setting(4, at_least=0, fixed=True, also="n_layer n_layers num_layers num_hidden_layers depth")
    """Number of transformer blocks. In a translation model: of the decoder. 0: only for a classifier with `pooling
    windows`."""
    encoder_layers: int = setting(0, at_least=0, fixed=True)
    """Number of encoder blocks of a translation model. 0: as many as `layers`."""
    heads: int = setting(4, at_least=1, fixed=True, also="n_head n_heads num_heads num_attention_heads")
    """Number of attention heads (query heads)."""
    kv_heads: int = setting(0, at_least=0, fixed=True, also="n_kv_heads num_key_value_heads num_kv_heads n_kv_head")
    """Number of key and value heads (grouped-query attention). 0: as many as query heads."""
    hidden_size: int = setting(
        128,
        at_least=1,
        fixed=True,
        was="model.width",
        renamed="0.3",
        also="n_embd d_model dim embed_dim embedding_dim n_embed hidden_dim model_dim width",
    )
    """Hidden size: width of the residual stream."""
    ffn_size: int = setting(
        0,
        at_least=0,
        fixed=True,
        was="model.feed_forward",
        renamed="0.3",
        also="intermediate_size ffn_dim ffn_hidden_size d_ff feed_forward dim_feedforward mlp_dim ffn_hidden_dim",
    )
    """Hidden size of the feed-forward. 0: 4 x hidden_size, or 8/3 x hidden_size rounded up to a multiple of 64 (llama)."""
    context: int = setting(
        128,
        at_least=1,
        fixed=True,
        also=(
            "block_size seq_len sequence_length seq_length max_seq_len max_seq_length "
            "max_sequence_length max_position_embeddings n_positions n_ctx context_length "
            "context_size max_length cutoff_len"
        ),
    )
    """Context length in tokens: number of tokens that a sample predicts. Also the longest attention."""
    dropout: float = setting(
        0.0,
        at_least=0,
        below=1,
        fixed=True,
        also="attention_dropout hidden_dropout resid_pdrop attn_pdrop embd_pdrop dropout_rate",
    )
    """Dropout probability in embeddings, attention and residual branches."""
    bias: bool = setting(False, fixed=True)
    """Use biases in linear layers and LayerNorm. `original` always has them."""
    rope_theta: float = setting(10000.0, above=0, fixed=True, also="rope_base rotary_base")
    """Base of the rotary frequencies (RoPE)."""
    pooling: Literal["mean", "first", "attention", "windows"] = setting("mean", fixed=True)
    """Pooling of a text classifier. `mean`: mean over tokens. `first`: first token. `attention`: mean with learned weights.

    `windows`: convolutions over neighbouring tokens, and the maximum of each channel over the text (Kim, 2014)."""
    head_dense: Literal["none", "tanh", "relu", "gelu"] = setting("none", fixed=True, since="0.3")
    """Layer between a classifier's pooling and its head. `tanh` (BERT, RoBERTa), `relu` (DistilBERT) and `gelu` (with
    LayerNorm; ModernBERT) name its activation. `none`: no layer."""
    windows: tuple[int, ...] = setting((3, 4, 5), at_least=1, fixed=True)
    """Kernel sizes in tokens of the convolutions of `pooling windows`."""
    window_channels: int = setting(100, at_least=1, fixed=True)
    """Number of channels of each convolution of `pooling windows`."""
    channels: tuple[int, ...] = setting((16, 32, 64), at_least=1, fixed=True)
    """Number of channels of each convolution of a convolutional network."""
    hidden: tuple[int, ...] = setting((512, 128), at_least=1, fixed=True)
    """Hidden sizes of a convolutional network's fully connected layers. Without the last layer, which has one output per
    class."""
    rope_scaling: tuple[float, float, float, float] | None = setting(None, above=0, fixed=True)
    """Scaling of rotary frequencies for a longer context, as in Llama 3.1 and later.

    A factor, a low and a high frequency factor, and the original context length, such as [8, 1, 4, 8192]."""
    head_size: int = setting(0, at_least=0, fixed=True, also="head_dim d_head d_kv")
    """Size of a head's query, key and value. 0: hidden_size / heads."""
    qkv_bias: bool = setting(False, fixed=True, also="attention_bias use_bias")
    """Use biases of queries, keys and values in self-attention, as in Qwen2. Independent of model.bias."""
    qk_norm: bool = setting(False, fixed=True)
    """Apply RMSNorm to each head's query and key in self-attention, as in Qwen3. Before rotary positions."""
    softcap: float = setting(0.0, at_least=0, fixed=True, since="0.2", also="attn_logit_softcapping")
    """Soft cap of self-attention's scores, as in Gemma 2 (50). A score s becomes softcap tanh(s / softcap). 0: none."""
    norm_eps: float = setting(1e-5, above=0, fixed=True, also="rms_norm_eps layer_norm_eps layer_norm_epsilon")
    """Term that norms add to the variance or mean square before the root."""
    gelu: Literal["exact", "tanh"] = setting("exact", fixed=True)
    """Form of GELU: exact (error function) or tanh approximation. OpenAI's GPT-2 was trained with the approximation."""
    tie_embeddings: bool | None = setting(
        None, fixed=True, was="model.tied", renamed="0.3", also="tie_word_embeddings weight_tying tied tie_weights"
    )
    """Share the embedding's weight with the language-model head. None: true, except with `llama`."""
    window: int = setting(0, at_least=0, fixed=True, since="0.2", also="sliding_window window_size local_attention")
    """Sliding window of self-attention in tokens, as in Mistral. The token itself counts. 0: all previous tokens. With
    `modernbert`, half of the window is on either side of the token."""
    window_layers: tuple[int, ...] = setting((), at_least=0, fixed=True, since="0.2")
    """Layers with the sliding window, counted from 0, as in Gemma 2 and 3. The other layers attend to all tokens. Empty: all
    layers have the window."""
    window_rope_theta: float = setting(0.0, at_least=0, fixed=True, since="0.2")
    """Base of the rotary frequencies in layers with the window. Gemma 3 has 10000. rope_scaling and rope_factor do not apply
    to these layers then. 0: the same as in other layers."""
    nope_layers: tuple[int, ...] = setting(
        (), at_least=0, fixed=True, since="0.2", was="model.unrotated_layers", renamed="0.3"
    )
    """Layers without rotary positions (NoPE), counted from 0. In SmolLM 3, every fourth layer."""
    rotary_fraction: float = setting(
        1.0,
        above=0,
        at_most=1,
        fixed=True,
        since="0.2",
        was="model.rotary_share",
        renamed="0.3",
        also="partial_rotary_factor rotary_pct",
    )
    """Fraction of each head's dimensions that are rotated, the first ones."""
    rope_factor: float = setting(1.0, above=0, fixed=True, since="0.2")
    """Divisor of the rotary positions, for a context longer by this factor. Larger models of Gemma 3 have 8."""
    out_bias: bool = setting(False, fixed=True, since="0.2")
    """Use a bias in self-attention's output projection. Together with qkv_bias it is Hugging Face's `attention_bias`."""
    query_pre_attn_scalar: int = setting(0, at_least=0, fixed=True, since="0.2", was="model.query_scalar", renamed="0.3")
    """Self-attention's scores are divided by the square root of this value, as in Gemma. 0: the head size."""
    gate: Literal["silu", "gelu"] = setting("silu", fixed=True, since="0.2")
    """Activation of the feed-forward's gate with `llama`. `silu`, or `gelu`: the tanh approximation, as in Gemma."""
    scaled_embedding: bool = setting(False, fixed=True, since="0.2")
    """Multiply embeddings by the square root of hidden_size, as in Gemma. `original` always does."""
    logit_softcap: float = setting(0.0, at_least=0, fixed=True, since="0.2", also="final_logit_softcapping")
    """Soft cap of the logits, as in Gemma 2 (30). A logit l becomes logit_softcap tanh(l / logit_softcap). 0: none."""
    experts: int = setting(
        0,
        at_least=0,
        fixed=True,
        since="0.4",
        also="num_experts num_local_experts n_experts n_routed_experts",
    )
    """Number of experts of each block's feed-forward (mixture of experts), with `llama`. 0: one feed-forward for all tokens.
    A token uses `experts_per_token` of them, chosen by `router`; no token is dropped."""
    experts_per_token: int = setting(
        2, at_least=1, fixed=True, since="0.4", also="num_experts_per_tok moe_top_k router_top_k num_experts_per_token"
    )
    """Number of experts that a token uses, at most `experts`."""
    shared_experts: int = setting(
        0, at_least=0, fixed=True, since="0.4", also="n_shared_experts num_shared_experts moe_num_shared_experts"
    )
    """Number of further experts that every token uses, as in DeepSeek-V3; one feed-forward, this many times as wide."""
    expert_ffn_size: int = setting(
        0, at_least=0, fixed=True, since="0.4", also="moe_intermediate_size expert_hidden_size moe_ffn_hidden_size"
    )
    """Hidden size of an expert. 0: that of a feed-forward, see `ffn_size`."""
    router: Literal["softmax", "softmax_normalized", "sigmoid"] = setting("softmax_normalized", fixed=True, since="0.4")
    """Choice and weights of a token's experts. `softmax`: the largest probabilities, which are the weights (OLMoE).
    `softmax_normalized`: the same, divided by their sum (Mixtral, Qwen3-MoE).

    `sigmoid`: the largest sigmoids plus a bias, weighted by the sigmoids divided by their sum (DeepSeek-V3). The bias
    balances the loads without a loss: see `router_bias_rate`."""
    balance_loss: float | None = setting(
        None, at_least=0, fixed=True, since="0.4", also="router_aux_loss_coef moe_aux_loss_coef aux_loss_alpha"
    )
    """Factor of the loss that balances the experts' loads (Fedus et al., 2022, equation 4), slot by slot, mean over layers.
    It is trained and not part of the reported loss. None: 0.01, or 0 with router `sigmoid`."""
    router_z_loss: float = setting(0.0, at_least=0, fixed=True, since="0.4", also="moe_z_loss_coef z_loss_coef")
    """Factor of the loss that keeps the router's logits small (Zoph et al., 2022, equation 5); 0.001 is usual."""
    router_bias_rate: float = setting(
        0.001, at_least=0, fixed=True, since="0.4", also="bias_update_speed load_balance_coeff"
    )
    """Move of each expert's bias after a step with router `sigmoid` (Wang et al., 2024): up if its load over all workers is
    below the mean, down if it is above."""
    qk_norm_joint: bool = setting(False, fixed=True, since="0.4")
    """Apply qk_norm to all heads' queries together, and to all keys, as in OLMo 2 and OLMoE, instead of to each head."""
    init_from: str | None = setting(
        None,
        fixed=True,
        also=(
            "model_name_or_path pretrained_model_name_or_path base_model pretrained checkpoint_dir "
            "model_path initial_load_path base_model_name_or_path"
        ),
    )
    """Pretrained model in safetensors, the initial weights of a new run. A folder, a URI, or a name on the Hugging Face
    hub, `org/name` or `org/name@revision`. Supported families: GPT-2, Llama, Qwen 2 and 3, Mistral, SmolLM, Phi-3, Gemma 2
    and 3, Mixtral, Qwen3-MoE, OLMoE; for `classification` BERT, RoBERTa, DistilBERT, ModernBERT.

    Settings of `model` and `tokenizer` that are not given come from it: the shape, the tokenizer, and the context length it
    was trained with, at most 2,048. Given settings that contradict it are an error."""
    kernels: Literal["auto", "triton", "torch"] = setting("auto")
    """Kernels of attention and other hot operations: Triton or PyTorch. `auto`: on GPUs each of our Triton kernels that has
    proved itself there, otherwise PyTorch's own.

    A kernel is proved once for a GPU model and versions of driver, Triton and PyTorch: it must be as accurate as PyTorch,
    give the same bits each time and, without train.exact, not be slower on the run's own shapes. The first start has a
    minute for it, beside the preparation; `raystride check --kernels` does it ahead. A run keeps its choice.

    `triton` takes all kernels, proved or not. Without a GPU it needs TRITON_INTERPRET=1, which runs kernels in Triton's
    interpreter: for correctness tests, very slow."""
    attention: Literal["triton", "library", "auto"] = setting(
        "triton", since="0.2", also="attn_implementation flash_attention use_flash_attention attention_backend"
    )
    """Attention backend on GPUs. `triton`: our kernel, where model.kernels takes it. `library`: FlashAttention-2, or
    FlashAttention 3 or 4 if installed, or cuDNN, which train.deterministic (the default) leaves out. `auto`: on Hopper and
    Blackwell, in 16 bits, the faster of the two in a short timing at the start of the run.
    Applies to plain causal or full attention, and to packed documents (`torch.nn.attention.varlen`); windows, sequence
    lengths, dropout and train.exact always use our kernel."""
    linear: Literal["auto", "torch", "onednn"] = setting("auto")
    """Backend of fp32 matrix products on CPUs. `torch`: PyTorch's own. `onednn`: oneDNN. `auto`: the faster for each shape
    and direction, measured at the first start on a machine; with train.exact PyTorch's own."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, sizes do not divide, or the architecture has no such part."""
        super().__post_init__()
        if not self.head_size and self.hidden_size % self.heads:
            raise self.error(
                "hidden_size", f"must be a multiple of model.heads, {self.heads}, unless model.head_size is set"
            )
        if not self.layers and self.pooling != "windows":
            raise self.error("layers", "must be at least 1, unless model.pooling is `windows`, which can do without")
        if self.pooling == "windows" and not self.windows:
            raise self.error("windows", "must name at least one size")
        if self.kv_heads and self.heads % self.kv_heads:
            raise self.error("kv_heads", f"must divide model.heads, {self.heads}")
        if self.architecture in ROTATED and self.head_size % 2:
            raise self.error("head_size", "must be even, which rotary positions need")
        if self.architecture in ROTATED and not self.head_size and self.hidden_size // self.heads % 2:
            raise self.error("hidden_size", "must give every head an even size, which rotary positions need")
        if self.architecture == "original" and self.hidden_size % 2:
            raise self.error("hidden_size", "must be even, as sinusoidal positions are pairs")
        if self.architecture in ROTATED and self.bias:
            raise self.error("bias", f"must be false with model.architecture `{self.architecture}`, whose layers have none")
        if self.architecture not in ("gpt2", *ENCODERS) and self.gelu != "exact":
            raise self.error("gelu", f"must be `exact` with model.architecture `{self.architecture}`, which has no GELU")
        if self.architecture != "llama" and self.rope_scaling:
            raise self.error(
                "rope_scaling", f"must be None with model.architecture `{self.architecture}`, which does not rotate"
            )
        if self.rope_scaling and self.rope_scaling[1] >= self.rope_scaling[2]:
            raise self.error("rope_scaling", "must have a low factor, its second number, below the high one, its third")
        self._check_layers()
        self._check_experts()
        if self.init_from and not (is_hub_name(self.init_from) and not exists(self.init_from)):
            # Workers have other working directories than the one in which this was typed.
            object.__setattr__(self, "init_from", absolute_uri(self.init_from))

    def _check_experts(self) -> None:
        """Raises SettingError for experts that a token cannot choose, and for their settings without experts."""
        if self.qk_norm_joint and not self.qk_norm:
            raise self.error("qk_norm_joint", "must be false without model.qk_norm")
        if not self.experts:
            for name in ("shared_experts", "expert_ffn_size"):
                if getattr(self, name):
                    raise self.error(name, "must be 0 without model.experts")
        elif self.experts_per_token > self.experts:
            raise self.error("experts_per_token", f"must be at most model.experts, {self.experts}")

    def _check_layers(self) -> None:
        """Raises SettingError for settings that only `llama` has, for missing layers, and heads that cannot be rotated."""
        if self.architecture != "llama":
            for name in LLAMA_ONLY:
                if name == "window_rope_theta" and self.architecture == "modernbert":
                    continue
                if getattr(self, name) != getattr(ModelConfig, name):
                    raise self.error(
                        name, f"must be {getattr(ModelConfig, name)} with model.architecture `{self.architecture}`"
                    )
            if self.norm == "sandwich":
                raise self.error("norm", f"must be `pre` or `post` with model.architecture `{self.architecture}`")
        for name in ("window_layers", "nope_layers"):
            if any(layer >= self.layers for layer in getattr(self, name)):
                raise self.error(name, f"must name layers from 0 to {self.layers - 1}, of model.layers {self.layers}")
        for name in ("window_layers", "window_rope_theta"):
            if getattr(self, name) and not self.window:
                raise self.error(name, f"must be {getattr(ModelConfig, name)} without model.window")
        if self.rope_factor != 1 and self.rope_scaling:
            raise self.error("rope_factor", "must be 1 with model.rope_scaling, which says how much slower")
        if self.rotary_fraction < 1 and (
            size := int((self.head_size or self.hidden_size // self.heads) * self.rotary_fraction)
        ) % 2 + (not size):
            raise self.error("rotary_fraction", f"must turn an even number of a head's numbers, not {size}")
