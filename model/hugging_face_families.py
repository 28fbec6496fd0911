"""The families of decoders of Llama's kind that Hugging Face's `config.json` names, and what each can say in it.

A family is Llama with peculiarities, each a setting of ours: some that all of its models have, some that they may have. So
the family of a decoder is the first that can say all that the decoder has. GPT-2 stands apart, in `hugging_face_config`.

    kind = family_of(config.model)                            # "gemma2" for a decoder with its norms, gate and caps
    FAMILIES[kind].describe(config.model)                     # {"hidden_activation": "gelu_pytorch_tanh", ...}
    settings, arithmetic = FAMILIES[kind].read(description)   # {"gate": "gelu", ...}, and what no setting of ours says
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raystride.model.shape import DecoderShape, UnfitError, head_size, hidden_width, sandwich_norm, window_of

ModelType = Literal["llama", "qwen2", "qwen3", "mistral", "smollm3", "phi3", "gemma2", "gemma3_text"]
Read = tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]
"""The settings that a description asks for; and by its keys what they cannot ask for, as it is and as it may be."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of `model.rope_scaling` by their names."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PECULIAR: dict[str, tuple[Any, str]] = {
    "qk_norm": (False, "qk_norm"),
    "softcap": (0.0, "attn_logit_softcapping"),
    "logit_softcap": (0.0, "final_logit_softcapping"),
    "gate": ("silu", "hidden_act"),
    "scaled_embedding": (False, "scaled_embedding"),
    "query_scalar": (0, "query_pre_attn_scalar"),
    "window": (0, "sliding_window"),
    "window_layers": ((), "layer_types"),
    "window_rope_theta": (0.0, "rope_local_base_freq"),
    "unrotated_layers": ((), "no_rope_layers"),
    "rotary_share": (1.0, "partial_rotary_factor"),
    "rope_factor": (1.0, "rope_type"),
    "rope_scaling": (None, "rope_type"),
    "qkv_bias": (False, "attention_bias"),
    "out_bias": (False, "attention_bias"),
}
"""Settings that set families apart: their values in plain Llama, and the keys that ask for others."""


@dataclass(frozen=True)
class DecoderFamily:
    """What one `model_type` says."""

    architecture: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from Llama's in each of its models."""
    marks: frozenset[str] = frozenset()
    """Settings without which a decoder is not written as one of this family, though some of it lack them."""
    others: frozenset[str] = frozenset()
    """Settings that differ in some of its models."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a key is that is missing, where that is not what it is for Llama."""
    even_heads: bool = False
    """The number of heads must divide the width."""
    own_padding: bool = True
    """It has a padding id by default, which may lie beyond a small vocabulary."""

    @property
    def is_gemma(self) -> bool:
        """Its keys are those of Gemma."""
        return "gate" in self.fixed

    def amiss(self, shape: DecoderShape) -> dict[str, Any]:
        """Settings of a decoder that this family cannot say, by name; or those that it must have."""
        own = _peculiar(shape)
        known = self.marks | self.others | self.fixed.keys()
        found = {name: value for name, value in own.items() if name not in known}
        if "out_bias" in self.others and shape.qkv_bias != shape.out_bias:
            found |= {name: True for name in ("qkv_bias", "out_bias") if name in own}
        return found | {name: getattr(shape, name) for name in (self.fixed.keys() | self.marks) - own.keys()}

    def describe(self, shape: DecoderShape) -> dict[str, Any]:
        """What `config.json` says of a decoder of this family, but for ids and its class."""
        described: dict[str, Any] = {
            "max_position_embeddings": shape.context,
            "hidden_size": shape.width,
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
        windowed = [window_of(shape, layer) > 0 for layer in range(shape.layers)]
        if self.is_gemma:
            described["hidden_activation"] = "gelu_pytorch_tanh"
            described["query_pre_attn_scalar"] = shape.query_scalar or head_size(shape)
            described["attn_logit_softcapping"] = shape.softcap or None
            described["final_logit_softcapping"] = shape.logit_softcap or None
        else:
            described |= {"hidden_act": "silu", "mlp_bias": False}
        if "window" in self.others | self.marks:
            described["sliding_window"] = shape.window or (shape.context if self.is_gemma else None)
        if "window_layers" in self.others and (shape.window or self.is_gemma):
            described["layer_types"] = [_SLIDING if each else _FULL for each in windowed]
            described |= {} if self.is_gemma else {"use_sliding_window": True, "max_window_layers": 0}
        if "unrotated_layers" in self.marks:
            described["no_rope_layers"] = [int(layer not in shape.unrotated_layers) for layer in range(shape.layers)]
        return described | ({"pad_token_id": None} if self.own_padding else {})

    def read(self, description: Mapping[str, Any]) -> Read:
        """What settings a description asks for. Raises KeyError for a size that it has not."""
        found = {**self.defaults, **description}
        width, heads, layers = found["hidden_size"], found["num_attention_heads"], found["num_hidden_layers"]
        size = found.get("head_dim") or self.defaults.get("head_dim") or width // heads
        types, scalar = self._layer_types(found, layers), found.get("query_pre_attn_scalar") or size
        windows = tuple(layer for layer, kind in enumerate(types) if kind == _SLIDING)
        biased, turned = bool(found.get("attention_bias")), found.get("no_rope_layers") or [1] * layers
        if "unrotated_layers" in self.marks and "no_rope_layers" not in description:
            every = found.get("no_rope_layer_interval", 4)
            turned = [(layer + 1) % every for layer in range(layers)]
        settings = {
            "flavour": "llama",
            "norm": "pre",
            "layers": layers,
            "heads": heads,
            "kv_heads": found.get("num_key_value_heads") or heads,
            "width": width,
            "head_size": size,
            "feed_forward": found["intermediate_size"],
            "norm_eps": found.get("rms_norm_eps", 1e-6),
            "tied": found.get("tie_word_embeddings", False),
            **{name: plain for name, (plain, _) in _PECULIAR.items()},
            "qkv_bias": biased,
            "out_bias": biased,
            "softcap": found.get("attn_logit_softcapping") or 0.0,
            "logit_softcap": found.get("final_logit_softcapping") or 0.0,
            "query_scalar": 0 if scalar == size else scalar,
            "window": found["sliding_window"] if windows else 0,
            "window_layers": () if len(windows) == layers else windows,
            "unrotated_layers": tuple(layer for layer, turn in enumerate(turned) if not turn),
        }
        rope, arithmetic = self._read_rope(found, windows=bool(windows))
        settings |= rope
        known = self.fixed.keys() | self.marks | self.others
        for name in _PECULIAR.keys() - known:
            plain, key = _PECULIAR[name]
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
        """Each layer's attention."""
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
        """The settings of rotary positions, where `windows` are layers that may have a base of their own."""
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
            "rotary_share": share,
        }
        if own_base and windows:
            base = local.get("rope_theta") or found.get("rope_local_base_freq", 10000.0)
            settings["window_rope_theta"] = 0.0 if base == theta and kind == "default" else base
        allowed = {"rope_scaling": "llama3", "rope_factor": "linear"}
        arithmetic = {"rope_type": (kind, ["default", *(each for name, each in allowed.items() if name in self.others)])}
        if (apart := local.get("rope_type", "default")) != "default":
            arithmetic["rope_type"] = (apart, ["default"])
        return settings, arithmetic


def _peculiar(shape: DecoderShape) -> dict[str, Any]:
    """What sets a decoder apart from plain Llama: settings by their names, with their values."""
    found = {name: getattr(shape, name) for name, (plain, _) in _PECULIAR.items() if getattr(shape, name) != plain}
    if sandwich_norm(shape):
        found["norm"] = shape.norm
    if shape.query_scalar == head_size(shape):
        found.pop("query_scalar", None)
    return found


def _describe_rope(shape: DecoderShape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        *factors, context = shape.rope_scaling
        rope |= {"rope_type": "llama3"} | dict(zip(_SCALING, (*factors, int(context)), strict=True))
    elif shape.rope_factor != 1:
        rope |= {"rope_type": "linear", "factor": shape.rope_factor}
    if shape.rotary_share != 1:
        rope["partial_rotary_factor"] = shape.rotary_share
    # Read by transformers 4, where 5 reads the parameters after them.
    old: dict[str, Any] = {"rope_theta": shape.rope_theta}
    old |= {"rope_scaling": rope} if rope["rope_type"] != "default" else {}
    old |= {"partial_rotary_factor": shape.rotary_share} if shape.rotary_share != 1 else {}
    if not (sandwich_norm(shape) and shape.qk_norm):
        return old | {"rope_parameters": rope}
    if not shape.window_rope_theta:
        return old | {"rope_local_base_freq": shape.rope_theta, "rope_parameters": {_FULL: rope, _SLIDING: rope}}
    local = {"rope_type": "default", "rope_theta": shape.window_rope_theta}
    return old | {"rope_local_base_freq": shape.window_rope_theta, "rope_parameters": {_FULL: rope, _SLIDING: local}}


_ROPE = frozenset({"rope_scaling", "rope_factor"})
_BIASED = frozenset({"qkv_bias", "out_bias"})
_WINDOWS = frozenset({"window", "window_layers"})
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
        marks=frozenset({"unrotated_layers"}),
        others=_ROPE | _BIASED,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "phi3": DecoderFamily(
        "Phi3ForCausalLM",
        marks=frozenset({"rotary_share"}),
        others=frozenset({"window"}),
        defaults={"rms_norm_eps": 1e-5},
        even_heads=True,
    ),
    "gemma2": DecoderFamily(
        "Gemma2ForCausalLM",
        _GEMMA,
        others=_ROPE | _WINDOWS | _BIASED | {"softcap", "logit_softcap", "query_scalar"},
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        even_heads=True,
    ),
    "gemma3_text": DecoderFamily(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        others=_ROPE | _WINDOWS | _BIASED | {"logit_softcap", "query_scalar", "window_rope_theta"},
        defaults=_GEMMA_DEFAULTS,
        even_heads=True,
    ),
}
"""By what `config.json` calls them, the plainest first."""


def family_of(shape: DecoderShape) -> ModelType:
    """The first family that can say what a decoder of flavour `llama` is.

    Raises ValueError, with the settings' names, where there is none.
    """
    found: dict[ModelType, dict[str, Any]] = {kind: family.amiss(shape) for kind, family in FAMILIES.items()}
    nearest = min(found, key=lambda kind: len(found[kind]))
    if not found[nearest]:
        if FAMILIES[nearest].even_heads and shape.width % shape.heads:
            raise UnfitError(
                f"model.heads is {shape.heads}: in the layout of `{nearest}` it must divide model.width, {shape.width}",
                setting="model.heads",
                value=shape.heads,
            )
        return nearest
    family, wrong = FAMILIES[nearest], found[nearest]
    named = ", ".join(f"model.{name} is {value}" for name, value in wrong.items())
    beside = [f"model.{name}" for name in _peculiar(shape) if name not in wrong]
    why = f" beside {', '.join(beside)}" if beside else ""
    wants = [f"model.{name} {value}" for name, value in family.fixed.items() if name in wrong]
    needs = f", which has {', '.join(wants)}" if wants else ""
    name, value = next(iter(wrong.items()))
    message = f"{named}: no layout says that{why}; the nearest is `{nearest}`{needs}"
    raise UnfitError(message, setting=f"model.{name}", value=value)
