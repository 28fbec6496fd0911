"""Hugging Face encoder families with a text classifier's head, read from and written to `config.json` without PyTorch.

BERT, RoBERTa and DistilBERT are one network (`model.architecture bert`) with other names; only the layer before the head
differs, and RoBERTa's positions begin after those of padding. ModernBERT is another network.

    kind = encoder_type(config.model)                          # "roberta"
    ENCODER_FAMILIES[kind].describe(config.model)             # {"hidden_size": 768, ...}
    settings, arithmetic = ENCODER_FAMILIES[kind].read(description)
    head_settings(description)                                 # {"pooling": "first", "head_dense": "tanh"}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raystride.model.shape import ClassifierShape, DecoderShape, UnfitError, hidden_width, layer_window

EncoderType = Literal["bert", "roberta", "distilbert", "modernbert"]
GELUS = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""`model.gelu` by Hugging Face's names."""
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_POOLINGS = {"cls": "first", "mean": "mean"}
_PLAIN: dict[str, Any] = {
    "qkv_bias": False,
    "qk_norm": False,
    "out_bias": False,
    "softcap": 0.0,
    "logit_softcap": 0.0,
    "query_pre_attn_scalar": 0,
    "rope_scaling": None,
    "rope_factor": 1.0,
    "rotary_fraction": 1.0,
    "nope_layers": (),
    "gate": "silu",
    "scaled_embedding": False,
}
"""Settings that have their defaults in all of these encoders."""


@dataclass(frozen=True)
class EncoderFamily:
    """An encoder family: one `model_type` of `config.json`."""

    architecture: str
    flavour: Literal["bert", "modernbert"]
    head_dense: Literal["tanh", "relu", "gelu"]
    keys: Mapping[str, str]
    """Keys of `config.json` by our settings."""
    dropouts: tuple[str, ...]
    """Keys of `config.json` for our one dropout."""
    padding: int
    """The padding id, if a description does not say."""
    segments: bool = False
    """Whether it adds a vector to each token of a first text, and another to those of a second one."""
    positions_before: int = 0
    """Rows of learned positions before that of the first token."""

    def read(self, description: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]:
        """Returns the settings of a description; and for other keys their value and the allowed values.

        Raises KeyError for a missing size.
        """
        sizes = {name: description[self.keys[name]] for name in ("layers", "heads", "hidden_size", "ffn_size")}
        activation = description.get(self.keys["gelu"], "gelu")
        settings = {
            "architecture": self.flavour,
            "norm": "post" if self.flavour == "bert" else "pre",
            **sizes,
            "kv_heads": sizes["heads"],
            "head_size": sizes["hidden_size"] // sizes["heads"],
            "norm_eps": description.get(self.keys.get("norm_eps", ""), 1e-5 if self.flavour == "modernbert" else 1e-12),
            "gelu": GELUS.get(activation),
            **_PLAIN,
        }
        arithmetic: dict[str, tuple[Any, list[Any]]] = {self.keys["gelu"]: (activation, list(GELUS))}
        if self.flavour == "modernbert":
            own, more = _read_modern(description, sizes["layers"])
            return settings | own, arithmetic | more
        arithmetic["position_embedding_type"] = (description.get("position_embedding_type", "absolute"), ["absolute"])
        for key in ("is_decoder", "add_cross_attention"):
            arithmetic[key] = (description.get(key, False), [False])
        if self.positions_before:
            arithmetic["pad_token_id"] = (description.get("pad_token_id", self.padding), [self.positions_before - 1])
        return settings, arithmetic

    def describe(self, shape: ClassifierShape) -> dict[str, Any]:
        """Returns the `config.json` of a classifier without ids and labels. Raises UnfitError for an unsupported setting."""
        self._check_supported(shape)
        values = {name: getattr(shape, name) for name in self.keys} | {"ffn_size": hidden_width(shape)}
        values["gelu"] = "gelu" if shape.gelu == "exact" else "gelu_pytorch_tanh"
        described = {key: values[name] for name, key in self.keys.items()} | dict.fromkeys(self.dropouts, shape.dropout)
        described["max_position_embeddings"] = shape.context + self.positions_before
        described |= {"type_vocab_size": 2} if self.segments else {}
        return described | (_describe_modern(shape) if self.flavour == "modernbert" else {})

    def _check_supported(self, shape: ClassifierShape) -> None:
        """Raises UnfitError, with the setting's name, for a setting that this family does not support."""
        modern = self.flavour == "modernbert"
        allowed: dict[str, Any] = {"architecture": [self.flavour]}
        allowed |= {"pooling": [*_POOLINGS.values()] if modern else ["first"], "head_dense": [self.head_dense]}
        allowed |= {"norm": ["auto", "pre" if modern else "post"], "kv_heads": [0, shape.heads]}
        allowed |= {"head_size": [0, shape.hidden_size // shape.heads]} | {name: [value] for name, value in _PLAIN.items()}
        allowed |= {"bias": [False]} if modern else {"window": [0]}
        allowed |= {} if "norm_eps" in self.keys else {"norm_eps": [1e-12]}
        for name, values in allowed.items():
            if (value := getattr(shape, name)) not in values:
                written = " or ".join(f"`{allowed_value}`" for allowed_value in values)
                message = f"model.{name} is {value!r}: a {self.architecture} has {written}"
                raise UnfitError(message, setting=f"model.{name}", value=value)


_BERT = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "gelu": "hidden_act",
}
_DISTILBERT = {
    "layers": "n_layers",
    "heads": "n_heads",
    "hidden_size": "dim",
    "ffn_size": "hidden_dim",
    "gelu": "activation",
}
_MODERNBERT = _BERT | {"norm_eps": "norm_eps", "gelu": "hidden_activation"}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_OF_DISTILBERT = ("dropout", "attention_dropout", "seq_classif_dropout")
_OF_MODERNBERT = ("attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout")
ENCODER_FAMILIES: dict[EncoderType, EncoderFamily] = {
    "bert": EncoderFamily("BertForSequenceClassification", "bert", "tanh", _BERT, _DROPOUTS, 0, segments=True),
    "roberta": EncoderFamily(
        "RobertaForSequenceClassification", "bert", "tanh", _BERT, _DROPOUTS, 1, segments=True, positions_before=2
    ),
    "distilbert": EncoderFamily("DistilBertForSequenceClassification", "bert", "relu", _DISTILBERT, _OF_DISTILBERT, 0),
    "modernbert": EncoderFamily(
        "ModernBertForSequenceClassification", "modernbert", "gelu", _MODERNBERT, _OF_MODERNBERT, 50283
    ),
}


def encoder_type(shape: DecoderShape) -> EncoderType:
    """Returns the `model_type` of an encoder: that of its base, else the plainest with its layer before the head.

    Raises ValueError, with the setting's name, if the two contradict.
    """
    if shape.family == "auto":
        if shape.architecture == "modernbert":
            return "modernbert"
        return "distilbert" if getattr(shape, "head_dense", "") == "relu" else "bert"
    for kind, family in ENCODER_FAMILIES.items():
        if kind == shape.family and family.flavour == shape.architecture:
            return kind
    known = ", ".join(kind for kind, family in ENCODER_FAMILIES.items() if family.flavour == shape.architecture)
    message = f"model.family is `{shape.family}`: with model.architecture `{shape.architecture}` it must be one of {known}"
    raise UnfitError(message, setting="model.family", value=shape.family)


def head_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings for pooling and the layer before the head of a described encoder; others may be configured."""
    family = ENCODER_FAMILIES[description["model_type"]]
    pooling = _POOLINGS.get(description.get("classifier_pooling", "cls"), "first")
    return {"pooling": pooling, "head_dense": family.head_dense}


def _read_modern(description: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]:
    every = description.get("global_attn_every_n_layers", 3)
    types = description.get("layer_types") or [_LOCAL if layer % every else _GLOBAL for layer in range(layers)]
    local = tuple(layer for layer, kind in enumerate(types) if kind == _LOCAL)
    ropes = description.get("rope_parameters") or {}
    base = _rope_theta(ropes, _GLOBAL) or description.get("global_rope_theta") or 160_000.0
    near = _rope_theta(ropes, _LOCAL) or description.get("local_rope_theta", 10_000.0) or base
    settings = {
        "bias": False,
        "rope_theta": float(base),
        "window": description.get("local_attention", 128) if local else 0,
        "window_layers": () if len(local) == layers else local,
        "window_rope_theta": float(near) if local else 0.0,
    }
    plain = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    arithmetic: dict[str, tuple[Any, list[Any]]] = {key: (description.get(key, False), [False]) for key in plain}
    arithmetic["classifier_activation"] = (description.get("classifier_activation", "gelu"), ["gelu"])
    kinds = {(ropes.get(kind) or {}).get("rope_type", "default") for kind in (_GLOBAL, _LOCAL)}
    return settings, arithmetic | {"rope_type": (next(iter(sorted(kinds - {"default"})), "default"), ["default"])}


def _rope_theta(ropes: Mapping[str, Any], kind: str) -> float:
    return float((ropes.get(kind) or {}).get("rope_theta") or 0.0)


def _describe_modern(shape: ClassifierShape) -> dict[str, Any]:
    near = shape.window_rope_theta or shape.rope_theta
    thetas = {_GLOBAL: shape.rope_theta, _LOCAL: near}
    return {
        "layer_types": [_LOCAL if layer_window(shape, layer) else _GLOBAL for layer in range(shape.layers)],
        "local_attention": shape.window or 128,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        "global_rope_theta": shape.rope_theta,  # keys of transformers before 5
        "local_rope_theta": near,
        "classifier_pooling": next(theirs for theirs, ours in _POOLINGS.items() if ours == shape.pooling),
        "cls_token_id": None,
        "sep_token_id": None,
    }
