"""A decoder's weights to and from the layouts of Hugging Face.

    gpt2 flavour     GPT2LMHeadModel
    llama flavour    the first of `hugging_face_families` that can say what it is: LlamaForCausalLM, Qwen2ForCausalLM, ...

Queries, keys and values lie in the same order, and RoPE pairs number i of a head with i + D / 2 in both. What differs: GPT-2
keeps linear weights as (in, out) and always has biases, which are zeros where the model has none; the others keep queries,
keys and values apart, but for Phi-3, which keeps even gate and up in one; Gemma's norms hold what is added to 1. What
`config.json` says of the arithmetic is in `model.hugging_face_config`.

    description, tensors = to_hugging_face(model, end_id=0)       # config.json, and tensors by name
    from_hugging_face(other, description, tensors)                # `other` gives the same logits
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raystride.model.cut import fill, shape_of_whole
from raystride.model.hugging_face_config import check_description, describe, model_type
from raystride.model.linear import Linear
from raystride.model.norm import RMSNorm
from raystride.model.shape import key_width, query_width, sandwich_norm
from raystride.model.transformer import Decoder


@dataclass(frozen=True)
class _Layout:
    """Where our modules lie: our name and theirs, which are several for rows of one tensor of ours."""

    root: str
    blocks: str
    outside: dict[str, tuple[str, ...]]
    inside: dict[str, tuple[str, ...]]
    biased: tuple[str, ...] = ()
    """Ours that always have a bias there."""
    transposed: bool = False
    """Linear weights in blocks are (in, out)."""
    added: bool = False
    """RMSNorm's weights there are what is added to 1."""

    def theirs(self, name: str) -> tuple[str, ...]:
        """Their names of one of our modules; none for one that holds no weights itself."""
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            return self.outside.get(name, ())
        return tuple(f"{self.blocks}.{match[1]}.{each}" for each in self.inside.get(match[2], ()))


_GPT2 = _Layout(
    root="transformer.",
    blocks="transformer.h",
    outside={
        "embedding": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    inside={
        "norm1": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "feed_forward.up": ("mlp.c_fc",),
        "feed_forward.down": ("mlp.c_proj",),
    },
    biased=("norm", "norm1", "attention.qkv", "attention.out", "norm2", "feed_forward.up", "feed_forward.down"),
    transposed=True,
)
_LLAMA = _Layout(
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
)
_HEAD_NORMS = {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)}
_SANDWICH = {
    "norm2": ("pre_feedforward_layernorm",),
    "norm3": ("post_attention_layernorm",),
    "norm4": ("post_feedforward_layernorm",),
}
_FUSED, _HALVES = "mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")
"""Of Phi-3: the rows of the second follow those of the first in one tensor."""
_NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Constants that older folders hold among the weights: the causal mask, the rotary frequencies."""


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


def names_there(model: nn.Module) -> Callable[[str], tuple[str, ...]]:
    """From our name of a module to theirs, which are several for rows of one of ours; none where no layout has it."""
    if not isinstance(model, Decoder):
        return lambda name: ()
    try:
        kind = model_type(model.shape)
    except ValueError:
        return lambda name: ()
    theirs = _layout(model, kind).theirs
    # Phi-3 has gate and up in one layer, see `half_there`.
    return (lambda name: () if name.endswith(("gate", "up")) else theirs(name)) if kind == "phi3" else theirs


def half_there(model: nn.Module, name: str) -> tuple[str, int] | None:
    """Of our module whose rows are the first (0) or second (1) half of one of theirs, that one's name, and which half."""
    if not isinstance(model, Decoder) or names_there(model)(name) or not name.endswith(("gate", "up")):
        return None
    try:
        (theirs,) = _layout(model, model_type(model.shape)).theirs(name)
    except ValueError:
        return None
    for number, half in enumerate(_HALVES):
        if f"{theirs}.weight".endswith(half):
            return f"{theirs}.weight".replace(half, _FUSED).removesuffix(".weight"), number
    return None


def to_hugging_face(model: Decoder, end_id: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `config.json` says of a model, and its weights by their names there, fp32 copies on the CPU.

    `end_id` is the id that ends a document. Raises ValueError, with the setting's name, for what no layout can say.
    """
    description = describe(model.shape, model.vocabulary_size, end_id)
    tensors: dict[str, torch.Tensor] = {}
    layout = _layout(model, description["model_type"])
    for home in _homes(model, layout):
        value = torch.zeros(sum(home.rows)) if home.ours is None else home.ours.detach().to("cpu", torch.float32)
        value = value - 1 if layout.added and isinstance(home.module, RMSNorm) else value
        for name, part in zip(home.names, value.split(home.rows), strict=True):
            part = part.t() if home.transposed else part
            # A copy in any case: safetensors takes no views, and no memory that two names share.
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    if description["model_type"] == "phi3":
        for name in [name for name in tensors if name.endswith(_HALVES[0])]:
            start = name.removesuffix(_HALVES[0])
            tensors[start + _FUSED] = torch.cat([tensors.pop(start + half) for half in _HALVES])
    return description, tensors


def from_hugging_face(
    model: Decoder, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, spare_ids: bool = False
) -> None:
    """Gives a model the weights of a folder, from its `config.json` and its tensors.

    `spare_ids`: the folder may have more ids than the model, and the last ones are left out. Qwen pads its vocabulary so.
    Raises ValueError, a sentence about the folder, where the model is another one or the weights are not all there; it may
    then hold some of them.
    """
    check_description(model.shape, description)
    kind = description["model_type"]
    layout = _layout(model, kind)
    found = _by_full_name(model, layout, description, tensors)
    with torch.no_grad():
        for home in _homes(model, layout):
            parts = [_take(found, tensors, name) for name in home.names]
            if layout.added and isinstance(home.module, RMSNorm):
                parts = [part.float() + 1 for part in parts]
            _fill(model, home, parts, spare_ids)
    if rest := sorted(name for name in found if not _NO_WEIGHT.search(name)):
        raise ValueError(f"it has weights for which a `{kind}` here has no place: {', '.join(rest[:4])}")


def _layout(model: Decoder, kind: str) -> _Layout:
    """Where the modules of a model lie in a folder of this model type."""
    if kind == "gpt2":
        return _GPT2
    shape, inside = model.shape, dict(_LLAMA.inside)
    inside |= _HEAD_NORMS if shape.qk_norm else {}
    inside |= _SANDWICH if sandwich_norm(shape) else {}
    inside |= {"attention.qkv": ("self_attn.qkv_proj",)} if kind == "phi3" else {}
    biased = ("attention.qkv",) * shape.qkv_bias + ("attention.out",) * shape.out_bias
    return replace(_LLAMA, inside=inside, biased=biased, added=sandwich_norm(shape))


def _homes(model: Decoder, layout: _Layout) -> Iterator[_Home]:
    """Every tensor of the layout, in the model's order."""
    apart = (query_width(model.shape), key_width(model.shape), key_width(model.shape))
    for name, module in model.named_modules():
        names = layout.theirs(name)
        biased = re.sub(r"^blocks\.\d+\.", "", name) in layout.biased
        for kind in ("weight", "bias")[: 1 + biased] if names else ():
            rows = apart if len(names) == 3 else (shape_of_whole(module.get_parameter("weight"))[0],)
            transposed = layout.transposed and kind == "weight" and isinstance(module, Linear) and module is not model.head
            yield _Home(module, kind, tuple(f"{each}.{kind}" for each in names), rows, transposed)


def _by_full_name(
    model: Decoder, layout: _Layout, description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """The folder's names by the full ones (OpenAI's GPT-2 leaves the root away), with a head where we have one."""
    found = {name if name.startswith((layout.root, "lm_head.")) else layout.root + name: name for name in tensors}
    embedding = found.get(f"{layout.outside['embedding'][0]}.weight")
    if model.head is not None:
        if description.get("tie_word_embeddings", layout is _GPT2) and embedding:
            found["lm_head.weight"] = embedding
    # Some folders write a tied head out; only one that differs from the embedding is a mistake.
    elif (head := found.pop("lm_head.weight", None)) and embedding and not torch.equal(tensors[head], tensors[embedding]):
        raise ValueError("its lm_head.weight is not its embedding, though its config.json ties one to the other")
    return found


def _take(found: dict[str, str], tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    half = next((each for each, suffix in enumerate(_HALVES) if name.endswith(suffix)), None)
    if name not in found and half is not None and (fused := name.removesuffix(_HALVES[half]) + _FUSED) in found:
        stored = tensors[found.pop(fused) if half else found[fused]]  # the second half is asked for last
        return stored.chunk(2)[half]
    if name not in found:
        raise ValueError(f"it has no tensor {name}")
    return tensors[found.pop(name)]


def _fill(model: Decoder, home: _Home, parts: list[torch.Tensor], spare_ids: bool) -> None:
    """Copies what was read into our tensor. Of learned positions, the first ones suffice."""
    if spare_ids and home.module in (model.embedding, model.head):
        parts = [parts[0][: model.vocabulary_size]]
    if home.module is model.positions:
        if len(parts[0]) < model.shape.context:
            raise ValueError(f"it has {len(parts[0])} positions: lower model.context, {model.shape.context}, to that")
        parts = [parts[0][: model.shape.context]]
    if home.module is model.embedding and len(parts[0]) != model.vocabulary_size:
        raise ValueError(
            f"its vocabulary has {len(parts[0])} ids and the run's tokenizer {model.vocabulary_size}: train with its own, "
            "--tokenizer.kind file --tokenizer.file FOLDER/tokenizer.json"
        )
    inner = shape_of_whole(home.module.get_parameter("weight"))[1:] if home.kind == "weight" else ()
    for name, part, rows in zip(home.names, parts, home.rows, strict=True):
        expected = (rows, *inner)[::-1] if home.transposed else (rows, *inner)
        if tuple(part.shape) != expected:
            raise ValueError(f"its tensor {name} is {tuple(part.shape)}: the settings make it {expected}")
    if home.ours is not None:
        read = torch.cat([part.t() if home.transposed else part for part in parts])
        fill(home.ours, lambda whole: whole.copy_(read))
    elif any(part.any() for part in parts):
        raise ValueError(f"it has biases, {home.names[0]} among them: set --model.bias true")
