"""What a Hugging Face `config.json` says of a decoder, both ways, without PyTorch, so that a driver can check one early.

describe(config.model, vocabulary_size=4096, end_id=0)    # {"model_type": "llama", "hidden_size": 128, ...}
notes = check_description(config.model, description)      # [], or ValueError: the settings are of another network
"""

from collections.abc import Mapping
from typing import Any

from model.shape import DecoderShape, hidden_width

EPS = 1e-5
"""Of both norms in `model.norm`."""
_LACKS = {
    "qwen2": "biases on queries, keys and values",
    "qwen3": "norms on queries and keys",
}
"""What our llama flavour would need for layouts that are nearly Llama's."""
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def describe(shape: DecoderShape, vocabulary_size: int, end_id: int) -> dict[str, Any]:
    """What `config.json` says of a decoder; `end_id` is the id that ends a document.

    Raises ValueError, with the setting's name, for what the layout cannot say.
    """
    if shape.flavour == "gpt2" and (shape.kv_heads or shape.heads) != shape.heads:
        raise ValueError(f"model.kv_heads is {shape.kv_heads}: GPT-2's layout has no grouped heads, only `llama` has")
    sizes = _describe_gpt2(shape) if shape.flavour == "gpt2" else _describe_llama(shape)
    return sizes | {"vocab_size": vocabulary_size, "bos_token_id": end_id, "eos_token_id": end_id, "dtype": "float32"}


def check_description(shape: DecoderShape, description: Mapping[str, Any]) -> list[str]:
    """Sentences about what would not be quite the same in a decoder of this shape.

    Raises ValueError, a sentence about the folder, for another network (naming the settings that it asks for) or for an
    arithmetic that ours has not.
    """
    flavour = description.get("model_type")
    if flavour not in ("gpt2", "llama"):
        lacks = f": `llama` here has no {_LACKS[flavour]}" if flavour in _LACKS else ""
        raise ValueError(f"it has model_type {flavour!r}, which is neither gpt2 nor llama{lacks}")
    try:
        settings, arithmetic = (_read_gpt2 if flavour == "gpt2" else _read_llama)(description)
    except KeyError as error:
        raise ValueError(f"its config.json has no {error}") from error
    ours = {name: getattr(shape, name) for name in settings}
    ours |= {"kv_heads": shape.kv_heads or settings["heads"], "feed_forward": hidden_width(shape)}
    flags = [f"--model.{name} {value}" for name, value in settings.items() if ours[name] != value]
    if flags:
        raise ValueError(f"its network is not the one that the settings describe: give {' '.join(flags)}")
    for key, (value, allowed) in arithmetic.items():
        if value not in allowed:
            raise ValueError(f"its {key} is {value!r}, and model.flavour `{flavour}` has {allowed[0]!r}")
    if arithmetic.get("activation_function", ("",))[0] in _TANH:
        return ["its GELU is the approximation by tanh and ours is exact: each activation is at most 0.0005 off"]
    return []


_Read = tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]
"""The settings that a description asks for; and by its keys what decides the arithmetic, as it is and as it may be."""


def _describe_gpt2(shape: DecoderShape) -> dict[str, Any]:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
    return dropout | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": hidden_width(shape),
        "activation_function": "gelu",
        "layer_norm_epsilon": EPS,
        "tie_word_embeddings": True,
    }


def _read_gpt2(description: Mapping[str, Any]) -> _Read:
    width, heads = description["n_embd"], description["n_head"]
    settings = {"flavour": "gpt2", "layers": description["n_layer"], "heads": heads, "kv_heads": heads, "width": width}
    settings["feed_forward"] = description.get("n_inner") or 4 * width
    return settings, {
        "layer_norm_epsilon": (description.get("layer_norm_epsilon", 1e-5), [EPS]),
        "activation_function": (description.get("activation_function", "gelu_new"), ["gelu", *_TANH]),
        "scale_attn_weights": (description.get("scale_attn_weights", True), [True]),
        "scale_attn_by_inverse_layer_idx": (description.get("scale_attn_by_inverse_layer_idx", False), [False]),
    }


def _describe_llama(shape: DecoderShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": shape.context,
        "hidden_size": shape.width,
        "intermediate_size": hidden_width(shape),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.width // shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": shape.rope_theta,  # read by transformers 4, where 5 reads the next
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": shape.dropout,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _read_llama(description: Mapping[str, Any]) -> _Read:
    width, heads = description["hidden_size"], description["num_attention_heads"]
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    settings = {
        "flavour": "llama",
        "layers": description["num_hidden_layers"],
        "heads": heads,
        "kv_heads": description.get("num_key_value_heads") or heads,
        "width": width,
        "feed_forward": description["intermediate_size"],
        "rope_theta": rope.get("rope_theta") or description.get("rope_theta", 10000.0),
    }
    return settings, {
        "rms_norm_eps": (description.get("rms_norm_eps", 1e-6), [EPS]),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ["default"]),
        "head_dim": (description.get("head_dim") or width // heads, [width // heads]),
        "hidden_act": (description.get("hidden_act", "silu"), ["silu"]),
        "attention_bias": (description.get("attention_bias", False), [False]),
        "mlp_bias": (description.get("mlp_bias", False), [False]),
    }
