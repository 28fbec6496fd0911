"""Names and shapes of a network's tensors in Hugging Face's layouts, without PyTorch, so that a driver can check a folder.

    tensor_shapes(config.model, 4096, "llama")    # {"model.embed_tokens.weight": (4096, 128), ...}

GPT-2 stores linear weights as (in, out) and always has biases; the others store queries, keys and values separately, except
Phi-3: queries, keys and values are one tensor, gate and up another. Experts are written by number, as on the hub;
transformers 5 may also store all experts of a block as two tensors, which are read as well: see `expert_sizes`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raystride.model.hugging_face_config import AnyType, described_type, is_encoder_type
from raystride.model.hugging_face_encoders import ENCODER_FAMILIES, EncoderType
from raystride.model.shape import (
    ENCODERS,
    DecoderShape,
    expert_width,
    has_first_norm,
    has_learned_positions,
    head_size,
    hidden_width,
    is_gated,
    is_post_norm,
    is_sandwich_norm,
    is_tied,
    key_width,
    query_width,
)


@dataclass(frozen=True)
class Layout:
    """Names of a network's modules in a folder. One of our modules may have several there, which share its rows."""

    root: str
    blocks: str
    outside: dict[str, tuple[str, ...]]
    inside: dict[str, tuple[str, ...]]
    biased: tuple[str, ...] = ()
    """Our modules that always have a bias in the layout."""
    transposed: bool = False
    """Whether linear weights in blocks are (in, out)."""
    added: bool = False
    """Whether RMSNorm weights are stored as weight - 1."""
    fused: str = ""
    """Name of the fused gate and up tensor in a block; see `HALVES`."""
    experts: tuple[str, ...] = ()
    """Name of a block's feed-forward with experts, and of an expert's gate, up and down."""
    saved: tuple[str, ...] = ()
    """PEFT's `modules_to_save` of a classifier: its fully trained modules."""
    foreign: tuple[str, ...] = ("lm_head.",)
    """Prefixes of names outside the root."""

    def names_of(self, name: str) -> tuple[str, ...]:
        """Returns the folder's names of one of our modules; none for a module without weights of its own."""
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None:
            return self.outside.get(name, ())
        return tuple(f"{self.blocks}.{match[1]}.{hf_name}" for hf_name in self.inside.get(match[2], ()))


GPT2 = Layout(
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
LLAMA = Layout(
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
_NUMBERED = ("mlp", "gate_proj", "up_proj", "down_proj")
STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")
"""Tensors of all experts of a block: gate and up (E, 2 F, C), down (E, C, F)."""
HALVES = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
"""In a fused layout the rows of the second follow those of the first in one tensor."""
NO_WEIGHT = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Constants that older folders hold among the weights: the causal mask, the rotary frequencies, 0, 1, 2, ..."""
_BIASED = (
    "embedding_norm", "norm1", "attention.qkv", "attention.out", "norm2", "feed_forward.up", "feed_forward.down", "dense",
    "head",
)  # fmt: skip
BERT = Layout(
    root="bert.",
    blocks="bert.encoder.layer",
    outside={
        "embedding": ("bert.embeddings.word_embeddings",),
        "positions": ("bert.embeddings.position_embeddings",),
        "embedding_norm": ("bert.embeddings.LayerNorm",),
        "dense": ("bert.pooler.dense",),
        "head": ("classifier",),
    },
    inside={
        "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.out": ("attention.output.dense",),
        "norm1": ("attention.output.LayerNorm",),
        "feed_forward.up": ("intermediate.dense",),
        "feed_forward.down": ("output.dense",),
        "norm2": ("output.LayerNorm",),
    },
    biased=_BIASED,
    saved=("pooler", "classifier"),
    foreign=("cls.", "classifier.", "qa_outputs."),
)
ROBERTA = replace(
    BERT,
    root="roberta.",
    blocks="roberta.encoder.layer",
    outside={
        "embedding": ("roberta.embeddings.word_embeddings",),
        "positions": ("roberta.embeddings.position_embeddings",),
        "embedding_norm": ("roberta.embeddings.LayerNorm",),
        "dense": ("classifier.dense",),
        "head": ("classifier.out_proj",),
    },
    saved=("classifier",),
    foreign=("lm_head.", "classifier.", "qa_outputs."),
)
DISTILBERT = Layout(
    root="distilbert.",
    blocks="distilbert.transformer.layer",
    outside={
        "embedding": ("distilbert.embeddings.word_embeddings",),
        "positions": ("distilbert.embeddings.position_embeddings",),
        "embedding_norm": ("distilbert.embeddings.LayerNorm",),
        "dense": ("pre_classifier",),
        "head": ("classifier",),
    },
    inside={
        "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out": ("attention.out_lin",),
        "norm1": ("sa_layer_norm",),
        "feed_forward.up": ("ffn.lin1",),
        "feed_forward.down": ("ffn.lin2",),
        "norm2": ("output_layer_norm",),
    },
    biased=_BIASED,
    saved=("pre_classifier", "classifier"),
    foreign=("vocab_", "pre_classifier.", "classifier.", "qa_outputs."),
)
MODERNBERT = Layout(
    root="model.",
    blocks="model.layers",
    outside={
        "embedding": ("model.embeddings.tok_embeddings",),
        "embedding_norm": ("model.embeddings.norm",),
        "norm": ("model.final_norm",),
        "dense": ("head.dense",),
        "dense_norm": ("head.norm",),
        "head": ("classifier",),
    },
    inside={
        "norm1": ("attn_norm",),
        "attention.qkv": ("attn.Wqkv",),
        "attention.out": ("attn.Wo",),
        "norm2": ("mlp_norm",),
        "feed_forward.gate": ("mlp.gate_proj",),
        "feed_forward.up": ("mlp.up_proj",),
        "feed_forward.down": ("mlp.Wo",),
    },
    biased=("head",),
    fused="mlp.Wi",
    saved=("head", "classifier"),
    foreign=("head.", "decoder.", "classifier.", "qa_outputs."),
)
_ENCODERS: dict[EncoderType, Layout] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
}
SEGMENTS = "embeddings.token_type_embeddings.weight"
"""Name after an encoder's root: the vectors added to tokens of a first text, and of a second one."""
HEAD_MODULES = ("dense", "dense_norm", "head")
"""Modules of a classifier that a base may lack; they are then newly initialized."""


def layout_of(shape: DecoderShape, kind: AnyType) -> Layout:
    """Returns the layout of a network in a folder of this `model_type`."""
    if is_encoder_type(kind):
        return _ENCODERS[kind]
    if kind == "gpt2":
        return GPT2
    inside = dict(LLAMA.inside)
    inside |= _HEAD_NORMS if shape.qk_norm else {}
    inside |= _SANDWICH if is_sandwich_norm(shape) else {}
    inside |= {"attention.qkv": ("self_attn.qkv_proj",)} if kind == "phi3" else {}
    experts = (("block_sparse_moe", "w1", "w3", "w2") if kind == "mixtral" else _NUMBERED) if shape.experts else ()
    if experts:
        feed_forward, *names = experts
        for ours, name in zip(("gate", "up", "down"), names, strict=True):
            numbered = (f"{feed_forward}.experts.{expert}.{name}" for expert in range(shape.experts))
            inside[f"feed_forward.{ours}"] = tuple(numbered)
        inside["feed_forward.router"] = (f"{feed_forward}.gate",)
    biased = ("attention.qkv",) * shape.qkv_bias + ("attention.out",) * shape.out_bias
    fused = "mlp.gate_up_proj" if kind == "phi3" else ""
    added = is_sandwich_norm(shape)
    return replace(LLAMA, inside=inside, biased=biased, added=added, fused=fused, experts=experts)


def encoder_names(kind: EncoderType, names: Iterable[str]) -> set[str]:
    """Returns the full names that belong to an encoder itself, and not to its head or pooler."""
    return {name for name in names if name.startswith(_ENCODERS[kind].root) and ".pooler." not in name}


def tensor_shapes(shape: DecoderShape, vocabulary_size: int, kind: AnyType) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors that a folder of this `model_type` holds for a decoder, by their names there."""
    layout = layout_of(shape, kind)
    found: dict[str, tuple[int, ...]] = {}
    for module, rows, inner in _iter_modules(shape, vocabulary_size):
        names = layout.names_of(module)
        short = re.sub(r"^blocks\.\d+\.", "", module)
        each_rows = (rows,) * len(names)
        if len(names) == 3 and short == "attention.qkv":
            each_rows = (query_width(shape), key_width(shape), key_width(shape))
        for name, size in zip(names, each_rows, strict=True):
            weight = (size, *inner)
            in_block = module != short
            found[f"{name}.weight"] = weight[::-1] if layout.transposed and in_block and inner else weight
            if short in layout.biased:
                found[f"{name}.bias"] = (size,)
    return _fuse_halves(found, layout.fused)


def full_names(layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Maps full names to a folder's names: OpenAI's GPT-2 omits the root, and old BERTs have gamma and beta."""
    found = {name if name.startswith((layout.root, *layout.foreign)) else layout.root + name: name for name in names}
    if layout.experts:  # a block's feed-forward is `mlp` in transformers 5, whatever it is on the hub
        found = {full.replace(".mlp.", f".{layout.experts[0]}."): name for full, name in found.items()}
    return {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", full)): name for full, name in found.items()}


def check_tensors(
    shape: DecoderShape,
    description: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, ...]],
    *,
    vocabulary_size: int | None,
    spare_ids: bool,
) -> None:
    """Raises ValueError, a sentence about the folder, if the tensors of a folder are not those of a network.

    For an encoder a folder may lack the head and the layer before it, or have others.

    `description` is complete, `sizes` has each tensor's shape by its name in the folder. `vocabulary_size`: None if it is
    not known yet. `spare_ids`: the folder may have more ids than the network.
    """
    kind = described_type(description)
    layout = layout_of(shape, kind)
    encoder = ENCODER_FAMILIES[kind] if is_encoder_type(kind) else None
    found = {name: sizes[stored] for name, stored in full_names(layout, sizes).items() if not NO_WEIGHT.search(name)}
    found = expert_sizes(layout, found)
    embedding, positions = (layout.names_of(module) for module in ("embedding", "positions"))
    with_ids, optional = {f"{embedding[0]}.weight"}, set[str]()
    if encoder:
        optional = {
            f"{name}.{what}" for module in HEAD_MODULES for name in layout.names_of(module) for what in ("weight", "bias")
        }
    else:
        found = _fuse_halves(found, layout.fused)
        with_ids.add("lm_head.weight")
        if is_tied(shape):
            found.pop("lm_head.weight", None)  # some folders write a tied head out
        elif description["tie_word_embeddings"] and (tied := found.get(f"{embedding[0]}.weight")) is not None:
            found["lm_head.weight"] = tied
    for name, size in tensor_shapes(shape, vocabulary_size or 0, kind).items():
        if name not in found:
            if name in optional:
                continue
            raise ValueError(f"it has no tensor {name}")
        stored = found.pop(name)
        if name in with_ids:
            _check_ids(stored, vocabulary_size, spare_ids)
            stored = (size[0], *stored[1:])
        if name in [f"{position_name}.weight" for position_name in positions] and stored:
            rows = stored[0] - (encoder.positions_before if encoder else 0)
            if rows < shape.context:
                raise ValueError(f"it has {rows} positions: lower model.context, {shape.context}, to that")
            stored = (size[0], *stored[1:])
        if stored != size and name not in optional:
            raise ValueError(f"its tensor {name} is {stored}: the settings make it {size}")
    if encoder and encoder.segments and found.pop(layout.root + SEGMENTS, ()) == ():
        raise ValueError(f"it has no tensor {layout.root + SEGMENTS}")
    if left := sorted(encoder_names(kind, found) if is_encoder_type(kind) else found):
        raise ValueError(f"it has weights for which a `{kind}` here has no place: {', '.join(left[:4])}")


def expert_sizes(layout: Layout, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns shapes by full names with the tensors of all experts as those of each."""
    found = {}
    for full, size in sizes.items():
        match = STACKED.search(full) if layout.experts else None
        if match is None or len(size) != 3:
            found[full] = size
            continue
        _, gate, up, down = layout.experts
        parts = {gate: (size[1] // 2, size[2]), up: (size[1] - size[1] // 2, size[2])}
        start = full[: match.start()] + ".experts"
        for name, part in (parts if match[1] == "gate_up" else {down: size[1:]}).items():
            found |= {f"{start}.{expert}.{name}.weight": part for expert in range(size[0])}
    return found


def stacked_name(layout: Layout, name: str) -> tuple[str, int | None]:
    """Returns the name of the tensor of all experts that holds an expert's, and which half of it (None: it is whole)."""
    start, part = re.sub(r"\.experts\.\d+\.", ".experts. ", name.removesuffix(".weight")).split(" ")
    half = layout.experts.index(part) - 1
    return (f"{start}gate_up_proj", half) if half < 2 else (f"{start}down_proj", None)


def _check_ids(stored: tuple[int, ...], vocabulary_size: int | None, spare_ids: bool) -> None:
    """Raises ValueError if an embedding has other ids than the tokenizer."""
    rows = stored[0] if stored else 0
    if vocabulary_size and (rows < vocabulary_size or (rows != vocabulary_size and not spare_ids)):
        raise ValueError(
            f"its vocabulary has {rows} ids and the run's tokenizer {vocabulary_size}: train with its own, "
            "--tokenizer.kind file --tokenizer.file FOLDER/tokenizer.json"
        )


def _iter_modules(shape: DecoderShape, vocabulary_size: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yields each of our modules with weights: its name, its rows, and the shape of a row, () for vectors."""
    width, hidden, encoder = shape.hidden_size, hidden_width(shape), shape.architecture in ENCODERS
    yield "embedding", vocabulary_size, (width,)
    if has_learned_positions(shape):
        yield "positions", shape.context, (width,)
    if encoder:
        yield "embedding_norm", width, ()
    norms = ["norm1", "norm2"] + ["norm3", "norm4"] * is_sandwich_norm(shape)
    for layer in range(shape.layers):
        block = f"blocks.{layer}"
        for norm in norms[not has_first_norm(shape, layer) :]:
            yield f"{block}.{norm}", width, ()
        yield f"{block}.attention.qkv", query_width(shape) + 2 * key_width(shape), (width,)
        if shape.qk_norm:
            yield f"{block}.attention.q_norm", query_width(shape) if shape.qk_norm_joint else head_size(shape), ()
            yield f"{block}.attention.k_norm", key_width(shape) if shape.qk_norm_joint else head_size(shape), ()
        yield f"{block}.attention.out", width, (query_width(shape),)
        if shape.experts:
            yield f"{block}.feed_forward.router", shape.experts, (width,)
            yield f"{block}.feed_forward.gate", expert_width(shape), (width,)
            yield f"{block}.feed_forward.up", expert_width(shape), (width,)
            yield f"{block}.feed_forward.down", width, (expert_width(shape),)
            continue
        if is_gated(shape):
            yield f"{block}.feed_forward.gate", hidden, (width,)
        yield f"{block}.feed_forward.up", hidden, (width,)
        yield f"{block}.feed_forward.down", width, (hidden,)
    if not is_post_norm(shape):
        yield "norm", width, ()
    if encoder:
        yield "dense", width, (width,)
        if shape.architecture == "modernbert":
            yield "dense_norm", width, ()
        return
    if not is_tied(shape):
        yield "head", vocabulary_size, (width,)


def _fuse_halves(shapes: dict[str, tuple[int, ...]], fused: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes with each gate and up fused, if the layout fuses them."""
    if not fused:
        return shapes
    found = {}
    for name, size in shapes.items():
        if name.endswith(HALVES[0]):
            found[name.removesuffix(HALVES[0]) + f"{fused}.weight"] = (2 * size[0], *size[1:])
        elif not name.endswith(HALVES[1]):
            found[name] = size
    return found
