"""A decoder's weights to and from the layouts of Hugging Face: `gpt2` as GPT2LMHeadModel, `llama` as LlamaForCausalLM.

The arithmetic is the same to rounding: RoPE pairs number i of a head with i + D / 2 in both, norms have eps 1e-5, queries,
keys and values lie in that order. What differs: GPT-2 keeps linear weights as (in, out) and always has biases, which are
zeros where `model.bias` is false, and OpenAI's has the GELU by tanh; Llama keeps queries, keys and values apart.

    description, tensors = to_hugging_face(model, end_id=0)       # config.json, and tensors by name
    notes = from_hugging_face(other, description, tensors)        # [], and `other` gives the same logits
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model.linear import Linear
from model.shape import DecoderShape, hidden_width
from model.transformer import Decoder


@dataclass(frozen=True)
class _Layout:
    """Where the modules of a flavour lie: our name and theirs, which are several for rows of one tensor of ours."""

    root: str
    blocks: str
    outside: dict[str, tuple[str, ...]]
    inside: dict[str, tuple[str, ...]]
    biases: bool = False
    transposed: bool = False

    def theirs(self, name: str) -> tuple[str, ...]:
        """Their names of one of our modules; none for one that holds no weights itself."""
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            return self.outside.get(name, ())
        return tuple(f"{self.blocks}.{match[1]}.{each}" for each in self.inside.get(match[2], ()))


_LAYOUTS = {
    "gpt2": _Layout(
        root="transformer.",
        blocks="transformer.h",
        outside={"embedding": ("transformer.wte",), "positions": ("transformer.wpe",), "norm": ("transformer.ln_f",)},
        inside={
            "norm1": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "norm2": ("ln_2",),
            "feed_forward.up": ("mlp.c_fc",),
            "feed_forward.down": ("mlp.c_proj",),
        },
        biases=True,
        transposed=True,
    ),
    "llama": _Layout(
        root="model.",
        blocks="model.layers",
        outside={"embedding": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)},
        inside={
            "norm1": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "norm2": ("post_attention_layernorm",),
            "feed_forward.gate": ("mlp.gate_proj",),
            "feed_forward.up": ("mlp.up_proj",),
            "feed_forward.down": ("mlp.down_proj",),
        },
    ),
}
_LACKS = {
    "qwen2": "biases on queries, keys and values",
    "qwen3": "norms on queries and keys",
}
"""What our llama flavour would need for layouts that are nearly Llama's."""
_NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Constants that older folders hold among the weights: the causal mask, the rotary frequencies."""
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class _Home:
    """One of our tensors, and those of theirs that hold its rows, one after the other."""

    module: nn.Module
    kind: str
    names: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool

    @property
    def ours(self) -> torch.Tensor | None:
        tensor: torch.Tensor | None = getattr(self.module, self.kind)
        return tensor


def to_hugging_face(model: Decoder, end_id: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `config.json` says of a model, and its weights by their names there, fp32 copies on the CPU.

    `end_id` is the id that ends a document. Raises ValueError, with the setting's name, for what the layout cannot say.
    """
    shape = model.shape
    if shape.flavour == "gpt2" and (shape.kv_heads or shape.heads) != shape.heads:
        raise ValueError(f"model.kv_heads is {shape.kv_heads}: GPT-2's layout has no grouped heads, only `llama` has")
    tensors: dict[str, torch.Tensor] = {}
    for home in _homes(model):
        value = torch.zeros(sum(home.rows)) if home.ours is None else home.ours.detach().to("cpu", torch.float32)
        for name, part in zip(home.names, value.split(home.rows), strict=True):
            part = part.t() if home.transposed else part
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    describe = _describe_gpt2 if shape.flavour == "gpt2" else _describe_llama
    ends = {"vocab_size": model.vocabulary_size, "bos_token_id": end_id, "eos_token_id": end_id, "dtype": "float32"}
    return describe(shape, model.norm.eps) | ends, tensors


def from_hugging_face(model: Decoder, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Gives a model the weights of a folder, from its `config.json` and its tensors, each of which is read once.

    Returns sentences about what will not be quite the same. Raises ValueError, a sentence about the folder, where the model
    is another one or the weights are not all there; the model may then hold some of them.
    """
    flavour = description.get("model_type")
    if flavour not in _LAYOUTS:
        lacks = f": `llama` here has no {_LACKS[flavour]}" if flavour in _LACKS else ""
        raise ValueError(f"it has model_type {flavour!r}, which is neither gpt2 nor llama{lacks}")
    read = _read_gpt2 if flavour == "gpt2" else _read_llama
    try:
        settings, arithmetic = read(description, model.norm.eps)
    except KeyError as error:
        raise ValueError(f"its config.json has no {error}") from error
    _check_settings(model.shape, {"flavour": flavour, **settings})
    for key, (value, allowed) in arithmetic.items():
        if value not in allowed:
            raise ValueError(f"its {key} is {value!r}, and model.flavour `{flavour}` has {allowed[0]!r}")
    found = _by_full_name(_LAYOUTS[flavour], description, tensors)
    with torch.no_grad():
        for home in _homes(model):
            _fill(model, home, [_take(found, tensors, name) for name in home.names])
    if rest := sorted(name for name in found if not _NO_WEIGHT.search(name)):
        raise ValueError(f"it has weights that model.flavour `{flavour}` has no place for: {', '.join(rest[:4])}")
    if arithmetic.get("activation_function", ("",))[0] in _TANH:
        return ["its GELU is the approximation by tanh and ours is exact: each activation is at most 0.0005 off"]
    return []


def _homes(model: Decoder) -> Iterator[_Home]:
    """Every tensor of the layout, in the model's order."""
    shape, layout = model.shape, _LAYOUTS[model.shape.flavour]
    head = shape.width // shape.heads
    apart = (shape.heads * head, *[(shape.kv_heads or shape.heads) * head] * 2)
    for name, module in model.named_modules():
        names = layout.theirs(name)
        kinds = ("weight", "bias") if layout.biases and not isinstance(module, nn.Embedding) else ("weight",)
        for kind in kinds if names else ():
            rows = apart if len(names) == 3 else (module.get_parameter("weight").shape[0],)
            transposed = layout.transposed and kind == "weight" and isinstance(module, Linear)
            yield _Home(module, kind, tuple(f"{each}.{kind}" for each in names), rows, transposed)


def _by_full_name(layout: _Layout, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The folder's names by the full ones (OpenAI's GPT-2 leaves the root away), with a head where we have one."""
    found = {name if name.startswith((layout.root, "lm_head.")) else layout.root + name: name for name in tensors}
    embedding = found.get(f"{layout.outside['embedding'][0]}.weight")
    if "head" in layout.outside:
        if description.get("tie_word_embeddings", False) and embedding:
            found["lm_head.weight"] = embedding
    elif (head := found.pop("lm_head.weight", None)) and embedding and not torch.equal(tensors[head], tensors[embedding]):
        raise ValueError("its lm_head.weight is not its embedding, and model.flavour `gpt2` has one weight for both")
    return found


def _take(found: dict[str, str], tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in found:
        raise ValueError(f"it has no tensor {name}")
    return tensors[found.pop(name)]


def _fill(model: Decoder, home: _Home, parts: list[torch.Tensor]) -> None:
    """Copies what was read into our tensor. Of learned positions, the first ones suffice."""
    if home.module is model.positions:
        if len(parts[0]) < model.shape.context:
            raise ValueError(f"it has {len(parts[0])} positions: lower model.context, {model.shape.context}, to that")
        parts = [parts[0][: model.shape.context]]
    if home.module is model.embedding and len(parts[0]) != model.vocabulary_size:
        raise ValueError(
            f"its vocabulary has {len(parts[0])} ids and the run's tokenizer {model.vocabulary_size}: train with its own, "
            "--tokenizer.kind file --tokenizer.file FOLDER/tokenizer.json"
        )
    inner = home.module.get_parameter("weight").shape[1:] if home.kind == "weight" else ()
    for name, part, rows in zip(home.names, parts, home.rows, strict=True):
        expected = (rows, *inner)[::-1] if home.transposed else (rows, *inner)
        if tuple(part.shape) != expected:
            raise ValueError(f"its tensor {name} is {tuple(part.shape)}: the settings make it {expected}")
    if home.ours is not None:
        home.ours.copy_(torch.cat([part.t() if home.transposed else part for part in parts]))
    elif any(part.any() for part in parts):
        raise ValueError(f"it has biases, {home.names[0]} among them: set --model.bias true")


def _check_settings(shape: DecoderShape, asked: dict[str, Any]) -> None:
    ours = {name: getattr(shape, name) for name in asked}
    ours |= {"kv_heads": shape.kv_heads or asked["heads"], "feed_forward": hidden_width(shape)}
    flags = [f"--model.{name} {value}" for name, value in asked.items() if ours[name] != value]
    if flags:
        raise ValueError(f"its network is not the one that the settings describe: give {' '.join(flags)}")


_Read = tuple[dict[str, Any], dict[str, tuple[Any, list[Any]]]]
"""The settings that a description asks for; and by its keys what decides the arithmetic, as it is and as it may be."""


def _describe_gpt2(shape: DecoderShape, eps: float) -> dict[str, Any]:
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
        "layer_norm_epsilon": eps,
        "tie_word_embeddings": True,
    }


def _read_gpt2(description: Mapping[str, Any], eps: float) -> _Read:
    width, heads = description["n_embd"], description["n_head"]
    settings = {"layers": description["n_layer"], "heads": heads, "kv_heads": heads, "width": width}
    settings["feed_forward"] = description.get("n_inner") or 4 * width
    return settings, {
        "layer_norm_epsilon": (description.get("layer_norm_epsilon", 1e-5), [eps]),
        "activation_function": (description.get("activation_function", "gelu_new"), ["gelu", *_TANH]),
        "scale_attn_weights": (description.get("scale_attn_weights", True), [True]),
        "scale_attn_by_inverse_layer_idx": (description.get("scale_attn_by_inverse_layer_idx", False), [False]),
    }


def _describe_llama(shape: DecoderShape, eps: float) -> dict[str, Any]:
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
        "rms_norm_eps": eps,
        "rope_theta": shape.rope_theta,  # read by transformers 4, where 5 reads the next
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": shape.dropout,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _read_llama(description: Mapping[str, Any], eps: float) -> _Read:
    width, heads = description["hidden_size"], description["num_attention_heads"]
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    settings = {
        "layers": description["num_hidden_layers"],
        "heads": heads,
        "kv_heads": description.get("num_key_value_heads") or heads,
        "width": width,
        "feed_forward": description["intermediate_size"],
        "rope_theta": rope.get("rope_theta") or description.get("rope_theta", 10000.0),
    }
    return settings, {
        "rms_norm_eps": (description.get("rms_norm_eps", 1e-6), [eps]),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), ["default"]),
        "head_dim": (description.get("head_dim") or width // heads, [width // heads]),
        "hidden_act": (description.get("hidden_act", "silu"), ["silu"]),
        "attention_bias": (description.get("attention_bias", False), [False]),
        "mlp_bias": (description.get("mlp_bias", False), [False]),
    }
