"""What a Hugging Face `config.json` says of a decoder, both ways, without PyTorch, so that a driver can check one early.

describe(config.model, vocabulary_size=4096, end_id=0)    # {"model_type": "llama", "hidden_size": 128, ...}
check_description(config.model, description)              # ValueError: the settings are of another network
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from raystride.model.shape import DecoderShape, head_size, hidden_width, is_tied, post_norm

ModelType = Literal["gpt2", "llama", "qwen2", "qwen3"]
"""What `config.json` calls a layout."""
_CLASSES: dict[ModelType, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GELU = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""`model.gelu` by their names of it."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of `model.rope_scaling` by their names."""


def model_type(shape: DecoderShape) -> ModelType:
    """The layout that says what a decoder is. Raises ValueError, with the setting's name, where there is none."""
    if post_norm(shape) and shape.flavour != "original":
        raise ValueError(f"model.norm is {shape.norm}: the layouts of GPT-2 and Llama normalise before, `pre`")
    if shape.softcap:
        raise ValueError(f"model.softcap is {shape.softcap}: the layouts of GPT-2 and Llama bound no scores")
    if shape.flavour == "llama":
        if shape.qkv_bias and shape.qk_norm:
            raise ValueError("model.qkv_bias is True: no layout has biases where model.qk_norm is true")
        if shape.width % shape.heads and not (shape.qkv_bias or shape.qk_norm):
            raise ValueError(f"model.heads is {shape.heads}: in Llama's layout it must divide model.width, {shape.width}")
        return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    if shape.flavour != "gpt2":
        raise ValueError(f"model.flavour is `{shape.flavour}`: no layout is known for it, only for `gpt2` and `llama`")
    if (shape.kv_heads or shape.heads) != shape.heads:
        raise ValueError(f"model.kv_heads is {shape.kv_heads}: GPT-2's layout has no grouped heads, only `llama` has")
    if shape.qk_norm:
        raise ValueError("model.qk_norm is True: GPT-2's layout has no norms of queries and keys, only `llama` has")
    if head_size(shape) * shape.heads != shape.width:
        raise ValueError(f"model.head_size is {shape.head_size}: in GPT-2's layout it is width / heads")
    return "gpt2"


def describe(shape: DecoderShape, vocabulary_size: int, end_id: int) -> dict[str, Any]:
    """What `config.json` says of a decoder; `end_id` is the id that ends a document.

    Raises ValueError, with the setting's name, for what no layout can say.
    """
    kind = model_type(shape)
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **(_describe_gpt2(shape) if kind == "gpt2" else _describe_llama(shape)),
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
    if kind not in _CLASSES:
        raise ValueError(f"it has model_type {kind!r}, which is none of {', '.join(_CLASSES)}")
    try:
        settings, arithmetic = (_read_gpt2 if kind == "gpt2" else _read_llama)(description)
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
    if shape.tied is None:
        ours["tied"] = settings["flavour"] == "gpt2"
    elif not shape.tied:
        ours["tied"] = settings["tied"]  # a head of its own may start as the embedding
    if flags := [_flag(name, value) for name, value in settings.items() if ours[name] != value]:
        raise ValueError(f"its network is not the one that the settings describe: give {' '.join(flags)}")


def _flag(name: str, value: Any) -> str:
    return f"--model.{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}"


_Read = tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]
"""The settings that a description asks for; and by its keys what they cannot ask for, as it is and as it may be."""


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


def _read_gpt2(description: Mapping[str, Any]) -> _Read:
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


def _describe_llama(shape: DecoderShape) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        *factors, context = shape.rope_scaling
        rope |= {"rope_type": "llama3"} | dict(zip(_SCALING, (*factors, int(context)), strict=True))
    return {
        "max_position_embeddings": shape.context,
        "hidden_size": shape.width,
        "intermediate_size": hidden_width(shape),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": head_size(shape),
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,  # read, as the next is, by transformers 4, where 5 reads the one after
        **({"rope_scaling": rope} if shape.rope_scaling else {}),
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": shape.dropout,
        "mlp_bias": False,
    }


def _read_llama(description: Mapping[str, Any]) -> _Read:
    kind = description["model_type"]
    width, heads = description["hidden_size"], description["num_attention_heads"]
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    settings = {
        "flavour": "llama",
        "norm": "pre",
        "layers": description["num_hidden_layers"],
        "heads": heads,
        "kv_heads": description.get("num_key_value_heads") or heads,
        "width": width,
        "head_size": description.get("head_dim") or (128 if kind == "qwen3" else width // heads),
        "feed_forward": description["intermediate_size"],
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "norm_eps": description.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or description.get("rope_theta", 10000.0),
        "rope_scaling": tuple(rope[key] for key in _SCALING) if rope_type == "llama3" else None,
        "tied": description.get("tie_word_embeddings", False),
    }
    return settings, {
        "rope_type": (rope_type, ["default", "llama3"]),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor") or description.get("partial_rotary_factor") or 1.0,
            [1.0],
        ),
        "hidden_act": (description.get("hidden_act", "silu"), ["silu"]),
        "attention_bias": (description.get("attention_bias", False), [False]),
        "mlp_bias": (description.get("mlp_bias", False), [False]),
        "use_sliding_window": (description.get("use_sliding_window", False), [False]),
        "layer_types": (sorted(set(description.get("layer_types") or ["full_attention"])), [["full_attention"]]),
    }
