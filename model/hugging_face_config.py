"""What a Hugging Face `config.json` says of a decoder, both ways, without PyTorch, so that a driver can check one early.

describe(config.model, vocabulary_size=4096, end_id=0)    # {"model_type": "llama", "hidden_size": 128, ...}
check_description(config.model, description)              # ValueError: the settings are of another network
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from raystride.model.hugging_face_families import FAMILIES, ModelType, Read, family_of
from raystride.model.shape import DecoderShape, UnfitError, head_size, hidden_width, is_tied, post_norm, window_of

_GELU = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""`model.gelu` by their names of it."""


def model_type(shape: DecoderShape) -> ModelType | Literal["gpt2"]:
    """The layout that says what a decoder is. Raises ValueError, with the setting's name, where there is none."""
    if post_norm(shape) and shape.flavour != "original":
        raise _unfit(shape, "norm", shape.norm, "the layouts of GPT-2 and Llama normalise before, `pre`")
    if shape.flavour == "llama":
        return family_of(shape)
    if shape.flavour != "gpt2":
        raise _unfit(shape, "flavour", f"`{shape.flavour}`", "no layout is known for it, only for `gpt2` and `llama`")
    if (shape.kv_heads or shape.heads) != shape.heads:
        raise _unfit(shape, "kv_heads", shape.kv_heads, "GPT-2's layout has no grouped heads, only `llama` has")
    if shape.qk_norm:
        raise _unfit(shape, "qk_norm", True, "GPT-2's layout has no norms of queries and keys, only `llama` has")
    for name in ("softcap", "logit_softcap", "window", "query_scalar"):
        if getattr(shape, name):
            raise _unfit(shape, name, getattr(shape, name), "GPT-2's layout has none")
    if head_size(shape) * shape.heads != shape.width:
        raise _unfit(shape, "head_size", shape.head_size, "in GPT-2's layout it is width / heads")
    return "gpt2"


def _unfit(shape: DecoderShape, name: str, written: object, why: str) -> UnfitError:
    return UnfitError(f"model.{name} is {written}: {why}", setting=f"model.{name}", value=getattr(shape, name))


def describe(shape: DecoderShape, vocabulary_size: int, end_id: int) -> dict[str, Any]:
    """What `config.json` says of a decoder; `end_id` is the id that ends a document.

    Raises ValueError, with the setting's name, for what no layout can say.
    """
    kind = model_type(shape)
    return {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else FAMILIES[kind].architecture],
        "model_type": kind,
        **(_describe_gpt2(shape) if kind == "gpt2" else FAMILIES[kind].describe(shape)),
        "tie_word_embeddings": is_tied(shape),
        "vocab_size": vocabulary_size,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "dtype": "float32",
    }


def check_description(shape: DecoderShape, description: Mapping[str, Any]) -> None:
    """Raises ValueError, a sentence about the folder, where a decoder of this shape is not what it describes.

    The sentence names what our decoders lack, or else the flags that make the settings describe the folder.
    """
    kind = description.get("model_type")
    if kind != "gpt2" and kind not in FAMILIES:
        raise ValueError(f"it has model_type {kind!r}, which is none of gpt2, {', '.join(FAMILIES)}")
    try:
        settings, arithmetic = _read_gpt2(description) if kind == "gpt2" else FAMILIES[kind].read(description)
    except KeyError as error:
        raise ValueError(f"its config.json has no {error}") from error
    for key, (value, allowed) in arithmetic.items():
        if value not in allowed:
            raise ValueError(f"its {key} is {value!r}, and a `{kind}` here has {' or '.join(map(repr, allowed))}")
    ours = {name: getattr(shape, name) for name in settings} | {"feed_forward": hidden_width(shape)}
    # What these leave open or to other settings follows from what those should be.
    ours["kv_heads"] = shape.kv_heads or settings["heads"]
    ours["head_size"] = shape.head_size or settings["width"] // settings["heads"]
    ours["norm"] = "pre" if shape.norm == "auto" else shape.norm
    ours |= {name: value for name, value in _settled(shape).items() if name in settings}
    if shape.tied is None:
        ours["tied"] = settings["flavour"] == "gpt2"
    elif not shape.tied:
        ours["tied"] = settings["tied"]  # a head of its own may start as the embedding
    if flags := [_flag(name, value) for name, value in settings.items() if ours[name] != value]:
        raise ValueError(f"its network is not the one that the settings describe: give {' '.join(flags)}")


def _settled(shape: DecoderShape) -> dict[str, Any]:
    """Settings that can be written in several ways, in the one in which they are read."""
    windowed = tuple(layer for layer in range(shape.layers) if window_of(shape, layer))
    return {
        "window": shape.window if windowed else 0,
        "window_layers": () if len(windowed) == shape.layers else windowed,
        "unrotated_layers": tuple(sorted(set(shape.unrotated_layers))),
        "query_scalar": 0 if shape.query_scalar == head_size(shape) else shape.query_scalar,
    }


def _flag(name: str, value: Any) -> str:
    return f"--model.{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}"


def _describe_gpt2(shape: DecoderShape) -> dict[str, Any]:
    return {
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": hidden_width(shape),
        "activation_function": "gelu" if shape.gelu == "exact" else "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
        "bias": shape.bias,  # read by us alone: the layout always has biases, which are zeros where a model has none
    }


def _read_gpt2(description: Mapping[str, Any]) -> Read:
    width, heads = description["n_embd"], description["n_head"]
    activation = description.get("activation_function", "gelu_new")
    settings = {
        "flavour": "gpt2",
        "norm": "pre",
        "layers": description["n_layer"],
        "heads": heads,
        "kv_heads": heads,
        "width": width,
        "head_size": width // heads,
        "feed_forward": description.get("n_inner") or 4 * width,
        "qk_norm": False,
        "norm_eps": description.get("layer_norm_epsilon", 1e-5),
        "gelu": _GELU.get(activation),
        "tied": description.get("tie_word_embeddings", True),
    }
    if description.get("bias", True):
        settings["bias"] = True
    return settings, {
        "activation_function": (activation, list(_GELU)),
        "scale_attn_weights": (description.get("scale_attn_weights", True), [True]),
        "scale_attn_by_inverse_layer_idx": (description.get("scale_attn_by_inverse_layer_idx", False), [False]),
    }
