"""Reads and writes a Hugging Face `config.json` of a decoder, without PyTorch, so that a driver can check one early.
Those of encoders are read here as well; see `model.hugging_face_encoders`.

describe(config.model, vocabulary_size=4096, end_id=0)    # {"model_type": "llama", "hidden_size": 128, ...}
check_description(config.model, description)              # ValueError: the settings describe another network
"""

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from raystride.model.hugging_face_encoders import ENCODER_FAMILIES, GELUS, EncoderType, encoder_type
from raystride.model.hugging_face_families import FAMILIES, ModelType, Read, family_of
from raystride.model.shape import (
    ENCODERS,
    DecoderShape,
    UnfitError,
    expert_width,
    head_size,
    hidden_width,
    is_post_norm,
    is_tied,
    layer_window,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

AnyType = ModelType | EncoderType | Literal["gpt2"]
"""A `model_type` that is read here."""


def model_type(shape: DecoderShape) -> AnyType:
    """Returns the `model_type` of the layout that describes a network: that of its base, else the plainest.

    Raises ValueError, with the setting's name, if there is none.
    """
    return encoder_type(shape) if shape.architecture in ENCODERS else decoder_type(shape)


def decoder_type(shape: DecoderShape) -> ModelType | Literal["gpt2"]:
    """Returns the `model_type` of a decoder, like `model_type`."""
    if is_post_norm(shape) and shape.architecture != "original":
        raise _unfit_error(shape, "norm", shape.norm, "the layouts of GPT-2 and Llama normalise before, `pre`")
    if shape.architecture == "llama":
        return family_of(shape)
    if shape.architecture != "gpt2":
        raise _unfit_error(
            shape, "architecture", f"`{shape.architecture}`", "no layout is known for it, only for `gpt2` and `llama`"
        )
    if shape.family not in ("auto", "gpt2"):
        raise _unfit_error(shape, "family", f"`{shape.family}`", "with model.architecture `gpt2` it must be `gpt2`")
    if (shape.kv_heads or shape.heads) != shape.heads:
        raise _unfit_error(shape, "kv_heads", shape.kv_heads, "GPT-2's layout has no grouped heads, only `llama` has")
    if shape.qk_norm:
        raise _unfit_error(shape, "qk_norm", True, "GPT-2's layout has no norms of queries and keys, only `llama` has")
    for name in ("softcap", "logit_softcap", "window", "query_pre_attn_scalar"):
        if getattr(shape, name):
            raise _unfit_error(shape, name, getattr(shape, name), "GPT-2's layout has none")
    if head_size(shape) * shape.heads != shape.hidden_size:
        raise _unfit_error(shape, "head_size", shape.head_size, "in GPT-2's layout it is width / heads")
    return "gpt2"


def _unfit_error(shape: DecoderShape, name: str, written: object, why: str) -> UnfitError:
    return UnfitError(f"model.{name} is {written}: {why}", setting=f"model.{name}", value=getattr(shape, name))


def describe(shape: DecoderShape, vocabulary_size: int, end_id: int) -> dict[str, Any]:
    """Returns the `config.json` of a decoder; `end_id` is the id that ends a document.

    Raises ValueError, with the setting's name, for a setting that no layout supports.
    """
    kind = decoder_type(shape)
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
    """Raises ValueError, a sentence about the folder, if a network of this shape is not the described one.

    The sentence names the unsupported feature, or else the flags that make the settings match the folder.
    """
    if flags := [format_flag(name, value) for name, value in differing_settings(shape, description).items()]:
        raise ValueError(f"its network is not the one that the settings describe: give {' '.join(flags)}")


def differing_settings(shape: DecoderShape, description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `model`, by name, that differ between a network of this shape and the described one.

    Raises ValueError, a sentence about the folder, for a feature that no setting covers.
    """
    kind = described_type(description)
    if described := description.get("quantization_config"):
        method = described.get("quant_method", "unknown") if isinstance(described, Mapping) else described
        raise ValueError(
            f"its weights are quantised ({method}), which are not read: dequantise them first, "
            "AutoModelForCausalLM.from_pretrained(...).dequantize(), and save that"
        )
    try:
        settings, arithmetic = _read_description(kind, description)
    except KeyError as error:
        raise ValueError(f"its config.json has no {error}") from error
    for key, (value, allowed) in arithmetic.items():
        if value not in allowed:
            raise ValueError(f"its {key} is {value!r}, and a `{kind}` here has {' or '.join(map(repr, allowed))}")
    ours = {name: getattr(shape, name) for name in settings} | {"ffn_size": hidden_width(shape)}
    # Automatic and derived values follow from the settings they depend on.
    ours["kv_heads"] = shape.kv_heads or settings["heads"]
    ours["head_size"] = shape.head_size or settings["hidden_size"] // settings["heads"]
    ours["expert_ffn_size"] = expert_width(shape)
    ours["norm"] = ("post" if is_post_norm(shape) else "pre") if shape.norm == "auto" else shape.norm
    ours |= {name: value for name, value in _canonical_settings(shape).items() if name in settings}
    if "tie_embeddings" not in settings:
        pass  # of an encoder nothing is tied
    elif shape.tie_embeddings is None:
        ours["tie_embeddings"] = settings["architecture"] == "gpt2"
    elif not shape.tie_embeddings:
        ours["tie_embeddings"] = settings["tie_embeddings"]  # a head of its own may start as the embedding
    if shape.family != "auto":
        settings["family"], ours["family"] = kind, shape.family
    return {name: value for name, value in settings.items() if ours[name] != value}


def _read_description(kind: AnyType, description: Mapping[str, Any]) -> Read:
    if is_encoder_type(kind):
        return ENCODER_FAMILIES[kind].read(description)
    return _read_gpt2(description) if kind == "gpt2" else FAMILIES[kind].read(description)


def is_encoder_type(kind: AnyType) -> "TypeIs[EncoderType]":
    """Returns whether a `model_type` is that of an encoder."""
    return kind in ENCODER_FAMILIES


def described_type(description: Mapping[str, Any]) -> AnyType:
    """Returns the `model_type` of a description. Raises ValueError if it is none that networks here have."""
    known = ("gpt2", *FAMILIES, *ENCODER_FAMILIES)
    for kind in known:
        if description.get("model_type") == kind:
            return kind  # type: ignore[return-value]
    raise ValueError(f"it has model_type {description.get('model_type')!r}, which is none of {', '.join(known)}")


def complete_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a description with its family's values of the keys that it lacks. Raises ValueError for an unknown family."""
    kind = described_type(description)
    if kind == "gpt2" or is_encoder_type(kind):
        return {"tie_word_embeddings": True, **description}
    return FAMILIES[kind].with_defaults(description)


def trained_context(description: Mapping[str, Any]) -> int:
    """Returns how many positions a described network was trained on; 0 if it does not say."""
    positions = int(description.get("n_positions") or description.get("max_position_embeddings") or 0)
    kind = described_type(description)
    before = ENCODER_FAMILIES[kind].positions_before if is_encoder_type(kind) else 0
    return positions - before if positions else 0


def _canonical_settings(shape: DecoderShape) -> dict[str, Any]:
    """Returns settings with several spellings in the one that is read."""
    windowed = tuple(layer for layer in range(shape.layers) if layer_window(shape, layer))
    return {
        "window": shape.window if windowed else 0,
        "window_layers": () if len(windowed) == shape.layers else windowed,
        "nope_layers": tuple(sorted(set(shape.nope_layers))),
        "query_pre_attn_scalar": 0 if shape.query_pre_attn_scalar == head_size(shape) else shape.query_pre_attn_scalar,
    }


def format_flag(name: str, value: Any) -> str:
    """Returns a setting of `model` as it is written on a command line."""
    return f"--model.{name} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}"


def _describe_gpt2(shape: DecoderShape) -> dict[str, Any]:
    return {
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
        "n_positions": shape.context,
        "n_embd": shape.hidden_size,
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
        "architecture": "gpt2",
        "norm": "pre",
        "layers": description["n_layer"],
        "heads": heads,
        "kv_heads": heads,
        "hidden_size": width,
        "head_size": width // heads,
        "ffn_size": description.get("n_inner") or 4 * width,
        "qk_norm": False,
        "norm_eps": description.get("layer_norm_epsilon", 1e-5),
        "gelu": GELUS.get(activation),
        "tie_embeddings": complete_description(description)["tie_word_embeddings"],
    }
    if description.get("bias", True):
        settings["bias"] = True
    return settings, {
        "activation_function": (activation, list(GELUS)),
        "scale_attn_weights": (description.get("scale_attn_weights", True), [True]),
        "scale_attn_by_inverse_layer_idx": (description.get("scale_attn_by_inverse_layer_idx", False), [False]),
    }
