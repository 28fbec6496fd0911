"""Hugging Face decoder families of Llama's kind, and the settings that the `config.json` of each supports.

A family is Llama with deviations, each one of our settings: some hold for all of its models, some for some. The family of a
decoder is that of its base (`model.family`); a decoder without a base has the first family that supports all its settings.
GPT-2 is separate, in `hugging_face_config`.

    kind = family_of(config.model)                            # "gemma2" for a decoder with its norms, gate and caps
    FAMILIES[kind].describe(config.model)                     # {"hidden_activation": "gelu_pytorch_tanh", ...}
    settings, arithmetic = FAMILIES[kind].read(description)   # {"gate": "gelu", ...}, and the other keys
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raystride.model.shape import (
    DecoderShape,
    UnfitError,
    balance_loss,
    expert_width,
    head_size,
    hidden_width,
    is_sandwich_norm,
    layer_window,
)

ModelType = Literal[
    "llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "olmoe"
]
Read = tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]
"""The settings of a description; and for its other keys the value and the allowed values."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of the numbers of `model.rope_scaling`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LLAMA_DEFAULTS: dict[str, tuple[Any, str]] = {
    "qk_norm": (False, "qk_norm"),
    "softcap": (0.0, "attn_logit_softcapping"),
    "logit_softcap": (0.0, "final_logit_softcapping"),
    "gate": ("silu", "hidden_act"),
    "scaled_embedding": (False, "scaled_embedding"),
    "query_pre_attn_scalar": (0, "query_pre_attn_scalar"),
    "window": (0, "sliding_window"),
    "window_layers": ((), "layer_types"),
    "window_rope_theta": (0.0, "rope_local_base_freq"),
    "nope_layers": ((), "no_rope_layers"),
    "rotary_fraction": (1.0, "partial_rotary_factor"),
    "rope_factor": (1.0, "rope_type"),
    "rope_scaling": (None, "rope_type"),
    "qkv_bias": (False, "attention_bias"),
    "out_bias": (False, "attention_bias"),
    "experts": (0, "num_local_experts"),
    "shared_experts": (0, "n_shared_experts"),
    "qk_norm_joint": (False, "qk_norm"),
}
"""Settings in which families differ: their values in plain Llama, and the keys of `config.json` for others."""


@dataclass(frozen=True)
class DecoderFamily:
    """A decoder family: one `model_type` of `config.json`."""

    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from Llama's in each of its models."""
    marks: frozenset[str] = frozenset()
    """Settings that a decoder needs to be exported as this family, though some of its models lack them."""
    others: frozenset[str] = frozenset()
    """Settings that differ in some of its models."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of missing keys that differ from Llama's."""
    even_heads: bool = False
    """Whether the number of heads must divide the width."""
    own_padding: bool = True
    """Whether it has a padding id by default, which may lie beyond a small vocabulary."""
    routers: tuple[str, ...] = ()
    """Its values of `model.router`; none without experts."""
    expert_size_key: str = "intermediate_size"
    """The key of an expert's width."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys that have one value here, which is also written."""

    @property
    def is_gemma(self) -> bool:
        """Whether its keys are those of Gemma."""
        return "gate" in self.fixed

    def with_defaults(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a description with this family's values of the keys that it lacks."""
        return {"tie_word_embeddings": False, **self.defaults, **description}

    def unsupported_settings(self, shape: DecoderShape, *, marked: bool = True) -> dict[str, Any]:
        """Returns the settings of a decoder, by name, that this family does not support or requires otherwise.

        `marked`: the family's `marks` are required as well.
        """
        own = _non_default_settings(shape)
        known = self.marks | self.others | self.fixed.keys()
        found = {name: value for name, value in own.items() if name not in known}
        if "out_bias" in self.others and shape.qkv_bias != shape.out_bias:
            found |= {name: True for name in ("qkv_bias", "out_bias") if name in own}
        if self.routers and shape.experts and shape.router not in self.routers:
            found["router"] = shape.router
        needed = self.fixed.keys() | self.marks if marked else self.fixed.keys() | (self.marks & {"experts"})
        return found | {name: getattr(shape, name) for name in needed - own.keys()}

    def describe(self, shape: DecoderShape) -> dict[str, Any]:
        """Returns the `config.json` of a decoder of this family without ids and its class."""
        described: dict[str, Any] = {
            "max_position_embeddings": shape.context,
            "hidden_size": shape.hidden_size,
            "intermediate_size": hidden_width(shape),
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads or shape.heads,
            "head_dim": head_size(shape),
            "rms_norm_eps": shape.norm_eps,
            **_describe_rope(shape),
            "attention_bias": shape.qkv_bias and shape.out_bias,
            "attention_dropout": shape.dropout,
        }
        windowed = [layer_window(shape, layer) > 0 for layer in range(shape.layers)]
        if self.is_gemma:
            described["hidden_activation"] = "gelu_pytorch_tanh"
            described["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or head_size(shape)
            described["attn_logit_softcapping"] = shape.softcap or None
            described["final_logit_softcapping"] = shape.logit_softcap or None
        else:
            described |= {"hidden_act": "silu", "mlp_bias": False}
        if "window" in self.others | self.marks:
            described["sliding_window"] = shape.window or (shape.context if self.is_gemma else None)
        if "window_layers" in self.others and (shape.window or self.is_gemma):
            described["layer_types"] = [_SLIDING if is_windowed else _FULL for is_windowed in windowed]
            described |= {} if self.is_gemma else {"use_sliding_window": True, "max_window_layers": 0}
        if self.routers:
            described |= self._describe_experts(shape)
        if "nope_layers" in self.marks:
            described["no_rope_layers"] = [int(layer not in shape.nope_layers) for layer in range(shape.layers)]
        return described | ({"pad_token_id": None} if self.own_padding else {})

    def _describe_experts(self, shape: DecoderShape) -> dict[str, Any]:
        described = {
            "num_experts" if len(self.routers) > 1 else "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            self.expert_size_key: expert_width(shape),
            "router_aux_loss_coef": balance_loss(shape),
            "output_router_logits": False,
            **self.required,
        }
        return described | ({"norm_topk_prob": shape.router == "softmax_normalized"} if len(self.routers) > 1 else {})

    def _read_experts(self, found: Mapping[str, Any]) -> Read:
        """Returns the settings of experts, and the keys that must have one value."""
        normalized = len(self.routers) == 1 or found.get("norm_topk_prob", False)
        settings = {
            "experts": found.get("num_local_experts") or found.get("num_experts"),
            "experts_per_token": found["num_experts_per_tok"],
            "expert_ffn_size": found[self.expert_size_key],
            "router": "softmax_normalized" if normalized else "softmax",
        }
        required = {key: (found.get(key) or value, [value]) for key, value in self.required.items()}
        return settings, required

    def read(self, description: Mapping[str, Any]) -> Read:
        """Returns the settings of a description. Raises KeyError for a missing size."""
        found = self.with_defaults(description)
        width, heads, layers = found["hidden_size"], found["num_attention_heads"], found["num_hidden_layers"]
        size = found.get("head_dim") or self.defaults.get("head_dim") or width // heads
        types, scalar = self._layer_types(found, layers), found.get("query_pre_attn_scalar") or size
        windows = tuple(layer for layer, kind in enumerate(types) if kind == _SLIDING)
        biased, turned = bool(found.get("attention_bias")), found.get("no_rope_layers") or [1] * layers
        if "nope_layers" in self.marks and "no_rope_layers" not in description:
            every = found.get("no_rope_layer_interval", 4)
            turned = [(layer + 1) % every for layer in range(layers)]
        settings = {
            "architecture": "llama",
            "norm": "pre",
            "layers": layers,
            "heads": heads,
            "kv_heads": found.get("num_key_value_heads") or heads,
            "hidden_size": width,
            "head_size": size,
            "ffn_size": found["intermediate_size"],
            "norm_eps": found.get("rms_norm_eps", 1e-6),
            "tie_embeddings": found["tie_word_embeddings"],
            **{name: plain for name, (plain, _) in _LLAMA_DEFAULTS.items()},
            "qkv_bias": biased,
            "out_bias": biased,
            "softcap": found.get("attn_logit_softcapping") or 0.0,
            "logit_softcap": found.get("final_logit_softcapping") or 0.0,
            "query_pre_attn_scalar": 0 if scalar == size else scalar,
            "window": found["sliding_window"] if windows else 0,
            "window_layers": () if len(windows) == layers else windows,
            "nope_layers": tuple(layer for layer, turn in enumerate(turned) if not turn),
        }
        rope, arithmetic = self._read_rope(found, windows=bool(windows))
        settings |= rope
        if self.routers:
            experts, required = self._read_experts(found)
            settings, arithmetic = settings | experts, arithmetic | required
            if self.expert_size_key == "intermediate_size":
                del settings["ffn_size"]  # no layer has one
        known = self.fixed.keys() | self.marks | self.others
        for name in _LLAMA_DEFAULTS.keys() - known:
            plain, key = _LLAMA_DEFAULTS[name]
            if settings[name] != plain and key not in arithmetic:
                arithmetic[key] = (found.get(key), [None if plain in (0, ()) else plain])
        activation, wanted = ("hidden_activation", "gelu_pytorch_tanh") if self.is_gemma else ("hidden_act", "silu")
        arithmetic[activation] = (found.get(activation) or wanted, [wanted])
        arithmetic["mlp_bias"] = (found.get("mlp_bias", False), [False])
        arithmetic["use_bidirectional_attention"] = (found.get("use_bidirectional_attention") or False, [False])
        if unknown := sorted(set(types) - {_FULL, _SLIDING}):
            arithmetic["layer_types"] = (unknown, [_FULL, _SLIDING])
        return settings | dict(self.fixed), arithmetic

    def _layer_types(self, found: Mapping[str, Any], layers: int) -> list[str]:
        """Returns the attention type of each layer."""
        window, named = found.get("sliding_window"), found.get("layer_types")
        if "window" not in self.marks | self.others or not window:
            return list(named or [_FULL] * layers)
        if "window_layers" not in self.others:
            return [_SLIDING] * layers
        if self.is_gemma:
            every = found.get("sliding_window_pattern") or 6
            return list(named or [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)])
        if not found.get("use_sliding_window"):
            return [_FULL] * layers
        first = found.get("max_window_layers", 28)
        return list(named or [_SLIDING if layer >= first else _FULL for layer in range(layers)])

    def _read_rope(self, found: Mapping[str, Any], *, windows: bool) -> Read:
        """Returns the settings of rotary positions; `windows`: windowed layers exist; they may have their own base."""
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        own_base = "window_rope_theta" in self.others
        local: Mapping[str, Any] = rope.get(_SLIDING) or {}
        rope = rope.get(_FULL) or ({} if local else rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        theta = rope.get("rope_theta") or found.get("rope_theta", 1e6 if own_base else 10000.0)
        share = rope.get("partial_rotary_factor") or found.get("partial_rotary_factor") or 1.0
        settings = {
            "rope_theta": theta,
            "rope_scaling": tuple(rope[key] for key in _SCALING) if kind == "llama3" else None,
            "rope_factor": rope["factor"] if kind == "linear" else 1.0,
            "rotary_fraction": share,
        }
        if own_base and windows:
            base = local.get("rope_theta") or found.get("rope_local_base_freq", 10000.0)
            settings["window_rope_theta"] = 0.0 if base == theta and kind == "default" else base
        allowed = {"rope_scaling": "llama3", "rope_factor": "linear"}
        arithmetic = {
            "rope_type": (kind, ["default", *(rope_type for name, rope_type in allowed.items() if name in self.others)])
        }
        if (apart := local.get("rope_type", "default")) != "default":
            arithmetic["rope_type"] = (apart, ["default"])
        return settings, arithmetic


def _non_default_settings(shape: DecoderShape) -> dict[str, Any]:
    """Returns the settings of a decoder that differ from plain Llama's, by name."""
    found = {name: getattr(shape, name) for name, (plain, _) in _LLAMA_DEFAULTS.items() if getattr(shape, name) != plain}
    if is_sandwich_norm(shape):
        found["norm"] = shape.norm
    if shape.query_pre_attn_scalar == head_size(shape):
        found.pop("query_pre_attn_scalar", None)
    return found


def _describe_rope(shape: DecoderShape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        *factors, context = shape.rope_scaling
        rope |= {"rope_type": "llama3"} | dict(zip(_SCALING, (*factors, int(context)), strict=True))
    elif shape.rope_factor != 1:
        rope |= {"rope_type": "linear", "factor": shape.rope_factor}
    if shape.rotary_fraction != 1:
        rope["partial_rotary_factor"] = shape.rotary_fraction
    # Read by transformers 4; 5 reads the parameters after them.
    old: dict[str, Any] = {"rope_theta": shape.rope_theta}
    old |= {"rope_scaling": rope} if rope["rope_type"] != "default" else {}
    old |= {"partial_rotary_factor": shape.rotary_fraction} if shape.rotary_fraction != 1 else {}
    if not (is_sandwich_norm(shape) and shape.qk_norm):
        return old | {"rope_parameters": rope}
    if not shape.window_rope_theta:
        return old | {"rope_local_base_freq": shape.rope_theta, "rope_parameters": {_FULL: rope, _SLIDING: rope}}
    local = {"rope_type": "default", "rope_theta": shape.window_rope_theta}
    return old | {"rope_local_base_freq": shape.window_rope_theta, "rope_parameters": {_FULL: rope, _SLIDING: local}}


_ROPE = frozenset({"rope_scaling", "rope_factor"})
_BIASED = frozenset({"qkv_bias", "out_bias"})
_WINDOWS = frozenset({"window", "window_layers"})
_EXPERTS = frozenset({"experts"})
_GEMMA: dict[str, Any] = {"norm": "sandwich", "gate": "gelu", "scaled_embedding": True}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES: dict[ModelType, DecoderFamily] = {
    "llama": DecoderFamily("LlamaForCausalLM", others=_ROPE | _BIASED, even_heads=True, own_padding=False),
    "qwen2": DecoderFamily("Qwen2ForCausalLM", {"qkv_bias": True}, others=_ROPE | _WINDOWS, own_padding=False),
    "qwen3": DecoderFamily(
        "Qwen3ForCausalLM",
        {"qk_norm": True},
        others=_ROPE | _WINDOWS | _BIASED,
        defaults={"head_dim": 128},
        own_padding=False,
    ),
    "mistral": DecoderFamily(
        "MistralForCausalLM",
        marks=frozenset({"window"}),
        others=_ROPE,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        own_padding=False,
    ),
    "smollm3": DecoderFamily(
        "SmolLM3ForCausalLM",
        marks=frozenset({"nope_layers"}),
        others=_ROPE | _BIASED,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "phi3": DecoderFamily(
        "Phi3ForCausalLM",
        marks=frozenset({"rotary_fraction"}),
        others=frozenset({"window"}),
        defaults={"rms_norm_eps": 1e-5},
        even_heads=True,
    ),
    "gemma2": DecoderFamily(
        "Gemma2ForCausalLM",
        _GEMMA,
        others=_ROPE | _WINDOWS | _BIASED | {"softcap", "logit_softcap", "query_pre_attn_scalar"},
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        even_heads=True,
    ),
    "gemma3_text": DecoderFamily(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        others=_ROPE | _WINDOWS | _BIASED | {"logit_softcap", "query_pre_attn_scalar", "window_rope_theta"},
        defaults=_GEMMA_DEFAULTS,
        even_heads=True,
    ),
    "mixtral": DecoderFamily(
        "MixtralForCausalLM",
        marks=_EXPERTS,
        others=_ROPE | {"window"},
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        own_padding=False,
        routers=("softmax_normalized",),
        required={"router_jitter_noise": 0.0},
    ),
    "qwen3_moe": DecoderFamily(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        marks=_EXPERTS,
        others=_ROPE | _BIASED,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        own_padding=False,
        routers=("softmax", "softmax_normalized"),
        expert_size_key="moe_intermediate_size",
        required={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "olmoe": DecoderFamily(
        "OlmoeForCausalLM",
        {"qk_norm": True, "qk_norm_joint": True},
        marks=_EXPERTS,
        others=_ROPE | _BIASED,
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        even_heads=True,
        routers=("softmax", "softmax_normalized"),
        required={"clip_qkv": None},
    ),
}
"""Families by their `model_type`, the plainest first."""


def family_of(shape: DecoderShape) -> ModelType:
    """Returns the family of a decoder of flavour `llama`: the configured one, else the plainest that supports it.

    Raises ValueError, with the settings' names, if there is none.
    """
    if shape.family != "auto":
        return _check_family(shape)
    possible = {kind: family for kind, family in FAMILIES.items() if bool(family.routers) == bool(shape.experts)}
    found: dict[ModelType, dict[str, Any]] = {kind: family.unsupported_settings(shape) for kind, family in possible.items()}
    nearest = min(found, key=lambda kind: len(found[kind]))
    if not found[nearest]:
        _check_heads(shape, nearest)
        return nearest
    raise _unfit_error(shape, nearest, found[nearest], f"no layout says that{{beside}}; the nearest is `{nearest}`")


def _check_family(shape: DecoderShape) -> ModelType:
    """Returns the configured family. Raises ValueError if it does not support the decoder."""
    for kind, family in FAMILIES.items():
        if kind == shape.family:
            if wrong := family.unsupported_settings(shape, marked=False):
                raise _unfit_error(shape, kind, wrong, f"model.family `{kind}` cannot say that{{beside}}")
            _check_heads(shape, kind)
            return kind
    message = f"model.family is {shape.family!r}: with model.architecture `llama` it must be one of {', '.join(FAMILIES)}"
    raise UnfitError(message, setting="model.family", value=shape.family)


def _check_heads(shape: DecoderShape, kind: ModelType) -> None:
    """Raises ValueError if the family requires heads that divide the width, and they do not."""
    if FAMILIES[kind].even_heads and shape.hidden_size % shape.heads:
        raise UnfitError(
            f"model.heads is {shape.heads}: in the layout of `{kind}` it must divide model.hidden_size, {shape.hidden_size}",
            setting="model.heads",
            value=shape.heads,
        )
    if kind == "olmoe" and head_size(shape) * shape.heads != shape.hidden_size:
        message = f"model.head_size is {shape.head_size}: in the layout of `olmoe` it is model.hidden_size / model.heads"
        raise UnfitError(message, setting="model.head_size", value=shape.head_size)


def _unfit_error(shape: DecoderShape, kind: ModelType, wrong: Mapping[str, Any], why: str) -> UnfitError:
    """Returns the error about settings that a family does not support."""
    named = ", ".join(f"model.{name} is {value}" for name, value in wrong.items())
    beside = [f"model.{name}" for name in _non_default_settings(shape) if name not in wrong]
    wants = [f"model.{name} {value}" for name, value in FAMILIES[kind].fixed.items() if name in wrong]
    why = why.format(beside=f" beside {', '.join(beside)}" if beside else "")
    name, value = next(iter(wrong.items()))
    message = f"{named}: {why}" + (f", which has {', '.join(wants)}" if wants else "")
    return UnfitError(message, setting=f"model.{name}", value=value)
