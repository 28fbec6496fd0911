"""Weights of a decoder, or of an encoder with a classifier's head, to and from the layouts of Hugging Face.

    gpt2 flavour     GPT2LMHeadModel
    llama flavour    the first of `hugging_face_families` that can describe it: LlamaForCausalLM, Qwen2ForCausalLM, ...
    bert flavour     BertForSequenceClassification, or another of `hugging_face_encoders`

Queries, keys and values have the same order, and RoPE pairs dimension i of a head with i + D / 2 in both. Differences: GPT-2
always has biases, zeros if the model has none; Gemma's norms store weight - 1. Names and shapes are in
`model.hugging_face_layout`, the reading of `config.json` in `model.hugging_face_config`.

    description, tensors = to_hugging_face(model, end_id=0)       # config.json, and tensors by name
    from_hugging_face(other, description, tensors)                # `other` gives the same logits
    description, tensors = encoder_to_hugging_face(classifier, labels=["no", "yes"], padding=0)
    begun = encoder_from_hugging_face(other, description, tensors, labels=["no", "yes"])    # []: nothing newly initialized
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raystride.model.classifier import Classifier
from raystride.model.cut import fill_parameter, full_shape, get_cut
from raystride.model.experts import ExpertLinear
from raystride.model.hugging_face_config import (
    AnyType,
    check_description,
    complete_description,
    describe,
    described_type,
    model_type,
)
from raystride.model.hugging_face_encoders import ENCODER_FAMILIES, encoder_type
from raystride.model.hugging_face_layout import (
    HALVES,
    HEAD_MODULES,
    SEGMENTS,
    Layout,
    check_tensors,
    full_names,
    layout_of,
    stacked_name,
)
from raystride.model.linear import Linear
from raystride.model.lora import fully_trained_modules
from raystride.model.norm import RMSNorm
from raystride.model.shape import ENCODERS, key_width, query_width
from raystride.model.transformer import Decoder


@dataclass(frozen=True)
class _TensorMapping:
    """One of our tensors, and the Hugging Face tensors that hold its rows, concatenated."""

    module: nn.Module
    kind: str
    names: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool
    stacked: bool = False
    """Whether each of its rows is a tensor of its own: an expert's matrix."""

    @property
    def ours(self) -> torch.Tensor | None:
        tensor: torch.Tensor | None = getattr(self.module, self.kind)
        return tensor


def hf_names(model: nn.Module) -> Callable[[str], tuple[str, ...]]:
    """Returns a function from our name of a module to its Hugging Face names: several if they share its rows.

    It returns none if no layout has the module. Phi-3 and ModernBERT fuse gate and up into one layer, whose name both get:
    see `fused_half`.
    """
    layout = _find_layout(model)
    if layout is None:
        return lambda name: ()
    return lambda name: tuple(_fused_name(layout, hf_name) or hf_name for hf_name in layout.names_of(name))


def peft_modules_to_save(model: nn.Module) -> tuple[str, ...]:
    """Returns PEFT's names of a classifier's fully trained modules; none for another network."""
    layout = _find_layout(model) if fully_trained_modules(model) else None
    return layout.saved if layout else ()


def fused_half(model: nn.Module, name: str) -> int | None:
    """Returns which half (0 or 1) of a fused Hugging Face layer one of our modules is; None if it is a full layer."""
    layout = _find_layout(model)
    if layout is None or not layout.fused:
        return None
    return next((number for number, end in enumerate(("gate", "up")) if name.endswith(f"feed_forward.{end}")), None)


def _find_layout(model: nn.Module) -> Layout | None:
    """Returns the layout of a network; None if no layout has it."""
    if not (isinstance(model, Decoder) or (isinstance(model, Classifier) and model.shape.architecture in ENCODERS)):
        return None
    try:
        kind: AnyType = model_type(model.shape)
    except ValueError:
        return None
    return layout_of(model.shape, kind)


def _fused_name(layout: Layout, name: str) -> str:
    """Returns the fused layer of a gate or an up; empty for another module."""
    for half in HALVES if layout.fused else ():
        if f"{name}.weight".endswith(half):
            return f"{name}.weight".removesuffix(half) + layout.fused
    return ""


def to_hugging_face(model: Decoder, end_id: int, *, family: str = "auto") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the `config.json` of a model, and its weights by their Hugging Face names, fp32 copies on the CPU.

    `end_id` is the id that ends a document; `family` the base's `model_type`, if the settings do not name it. Raises
    ValueError, with the setting's name, for a setting that no layout supports.
    """
    shape = model.shape if family == "auto" else replace(model.shape, family=family)  # type: ignore[type-var]
    description = describe(shape, model.vocabulary_size, end_id)
    return description, _export_tensors(model, layout_of(shape, description["model_type"]))


def _export_tensors(model: Decoder | Classifier, layout: Layout) -> dict[str, torch.Tensor]:
    """Returns the weights by their names in a layout, fp32 copies on the CPU."""
    tensors: dict[str, torch.Tensor] = {}
    for mapping in _tensor_mappings(model, layout):
        value = torch.zeros(sum(mapping.rows)) if mapping.ours is None else mapping.ours.detach().to("cpu", torch.float32)
        value = value - 1 if layout.added and isinstance(mapping.module, RMSNorm) else value
        parts = value.unbind() if mapping.stacked else value.split(mapping.rows)
        for name, part in zip(mapping.names, parts, strict=True):
            part = part.t() if mapping.transposed else part
            # Always a copy: safetensors takes no views, and no memory shared by two names.
            tensors[name] = part.clone(memory_format=torch.contiguous_format)
    for name in [name for name in tensors if layout.fused and name.endswith(HALVES[0])]:
        start = name.removesuffix(HALVES[0])
        tensors[f"{start}{layout.fused}.weight"] = torch.cat([tensors.pop(start + half) for half in HALVES])
    return tensors


def encoder_to_hugging_face(
    model: Classifier, labels: Sequence[str], padding: int | None = None, *, family: str = "auto"
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the `config.json` of an encoder with a classifier's head, and its weights, like `to_hugging_face`.

    `padding` is the padding id; None: the family's. Raises ValueError, with the setting's name, for a setting that the
    layout does not support.
    """
    shape = model.shape if family == "auto" else replace(model.shape, family=family)  # type: ignore[type-var]
    kind = encoder_type(shape)
    theirs, layout = ENCODER_FAMILIES[kind], layout_of(shape, kind)
    described = theirs.describe(shape)
    tensors = _export_tensors(model, layout)
    if theirs.positions_before:
        name = f"{layout.outside['positions'][0]}.weight"
        tensors[name] = torch.cat((tensors[name].new_zeros(theirs.positions_before, shape.hidden_size), tensors[name]))
    if theirs.segments:  # the first text's vector is in the positions, see `encoder_from_hugging_face`
        tensors[layout.root + SEGMENTS] = torch.zeros(2, shape.hidden_size)
    words = model.embedding.num_embeddings
    padding = theirs.padding if padding is None else padding
    return {
        "architectures": [theirs.architecture],
        "model_type": kind,
        **described,
        "vocab_size": words,
        "pad_token_id": padding if padding < words else None,
        "bos_token_id": None,
        "eos_token_id": None,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
        "dtype": "float32",
    }, tensors


def from_hugging_face(
    model: Decoder,
    description: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    spare_ids: bool = False,
    share_frozen: bool = False,
) -> None:
    """Loads the weights of a Hugging Face folder into a model, from its `config.json` and its tensors.

    `spare_ids`: the folder may have more ids than the model, and the last ones are left out. Qwen pads its vocabulary so.
    `share_frozen`: parameters without gradients use the tensors themselves, without a copy, if dtype and order match: for a
    memory-mapped file the processes of a machine hold them once. Raises ValueError, a sentence about the folder, if the
    model is another one or weights are missing.
    """
    shape = model.shape
    check_description(shape, description)
    description = complete_description(description)
    layout = layout_of(shape, described_type(description))
    stored = full_names(layout, tensors)
    sizes = {name: tuple(tensors[name].shape) for name in stored.values()}
    check_tensors(shape, description, sizes, vocabulary_size=model.vocabulary_size, spare_ids=spare_ids)
    embedding = stored[f"{layout.outside['embedding'][0]}.weight"]
    if model.head is not None and description["tie_word_embeddings"]:
        stored["lm_head.weight"] = embedding
    elif (
        model.head is None and (head := stored.get("lm_head.weight")) and not torch.equal(tensors[head], tensors[embedding])
    ):
        raise ValueError("its lm_head.weight is not its embedding, though its config.json ties one to the other")
    with torch.no_grad():
        for mapping in _tensor_mappings(model, layout):
            if mapping.stacked:
                parts = [_read_experts(stored, tensors, mapping.names, layout)]
            else:
                parts = [_read_tensor(stored, tensors, name, layout) for name in mapping.names]
            if layout.added and isinstance(mapping.module, RMSNorm):
                parts = [part.float() + 1 for part in parts]
            _load_tensor(mapping, parts, share_frozen)


def encoder_from_hugging_face(
    model: Classifier,
    description: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    labels: Sequence[str] = (),
    spare_ids: bool = False,
    share_frozen: bool = False,
) -> list[str]:
    """Loads a folder's encoder into a classifier, like `from_hugging_face`; returns the modules that keep their own values.

    These are the head, unless the folder has one for the same labels (in any order), and the layer before it, if the folder
    has none. There are no text pairs here, so BERT's vector for all tokens of a first text is added to the positions.
    """
    shape = model.shape
    check_description(shape, description)
    kind = described_type(description)
    layout, family = layout_of(shape, kind), ENCODER_FAMILIES[kind]  # type: ignore[index]
    stored = full_names(layout, tensors)
    sizes = {name: tuple(tensors[name].shape) for name in stored.values()}
    check_tensors(shape, description, sizes, vocabulary_size=model.embedding.num_embeddings, spare_ids=spare_ids)
    order, begun = _label_rows(description, labels), []
    with torch.no_grad():
        for mapping in _tensor_mappings(model, layout):
            ours = next((head_module for head_module in HEAD_MODULES if getattr(model, head_module) is mapping.module), "")
            if ours and (not {*mapping.names} <= stored.keys() or (ours == "head" and not order)):
                begun.append(ours)
                continue
            parts = [_read_tensor(stored, tensors, name, layout) for name in mapping.names]
            if mapping.module is model.positions:
                parts = [parts[0][family.positions_before :]]
                parts = [parts[0] + tensors[stored[layout.root + SEGMENTS]][0]] if family.segments else parts
            if ours == "head":
                parts = [parts[0][order]]
            _load_tensor(mapping, parts, share_frozen)
    return [head_module for head_module in HEAD_MODULES if head_module in begun]


def _label_rows(description: Mapping[str, Any], labels: Sequence[str]) -> list[int]:
    """Returns the rows of a folder's head for these labels, in their order; none if it has other labels."""
    named = {str(label): int(number) for number, label in (description.get("id2label") or {}).items()}
    return [named[label] for label in labels] if named.keys() == {*labels} else []


def _tensor_mappings(model: Decoder | Classifier, layout: Layout) -> Iterator[_TensorMapping]:
    """Yields the mapping of every tensor of the layout, in the model's order."""
    apart = (query_width(model.shape), key_width(model.shape), key_width(model.shape))
    for name, module in model.named_modules():
        names = () if isinstance(module, nn.Identity) else layout.names_of(name)
        biased = re.sub(r"^blocks\.\d+\.", "", name) in layout.biased
        for kind in ("weight", "bias")[: 1 + biased] if names else ():
            stacked = isinstance(module, ExpertLinear)
            whole = (full_shape(module.get_parameter("weight"))[0],)
            rows = apart if len(names) == 3 and not stacked else whole
            transposed = layout.transposed and kind == "weight" and isinstance(module, Linear) and module is not model.head
            yield _TensorMapping(module, kind, tuple(f"{hf_name}.{kind}" for hf_name in names), rows, transposed, stacked)


def _read_tensor(stored: Mapping[str, str], tensors: Mapping[str, torch.Tensor], name: str, layout: Layout) -> torch.Tensor:
    """Returns a tensor by its full name, or its half of a fused one."""
    half = next((number for number, suffix in enumerate(HALVES) if name.endswith(suffix)), None)
    if name not in stored and half is not None:
        return tensors[stored[f"{name.removesuffix(HALVES[half])}{layout.fused}.weight"]].chunk(2)[half]
    return tensors[stored[name]]


def _read_experts(
    stored: Mapping[str, str], tensors: Mapping[str, torch.Tensor], names: Sequence[str], layout: Layout
) -> torch.Tensor:
    """Returns the matrices of all experts (E, out, in), from a tensor each or from one of all."""
    if names[0] in stored:
        return torch.stack([tensors[stored[name]] for name in names])
    whole, half = stacked_name(layout, names[0])
    found = tensors[stored[whole]]
    return found if half is None else found.chunk(2, 1)[half]


def _load_tensor(mapping: _TensorMapping, parts: list[torch.Tensor], share_frozen: bool) -> None:
    """Fills one of our tensors; of ids and of learned positions it takes the first ones."""
    ours, rows = mapping.ours, sum(mapping.rows)
    if share_frozen and ours is not None and _can_share(ours, parts, mapping):
        ours.data = parts[0][:rows]
        return
    read = torch.cat([part.t() if mapping.transposed else part for part in parts])
    if ours is not None:
        fill_parameter(ours, lambda whole: whole.copy_(read[:rows]))
    elif read.any():
        raise ValueError(f"it has biases, {mapping.names[0]} among them: set --model.bias true")


def _can_share(ours: torch.Tensor, parts: list[torch.Tensor], mapping: _TensorMapping) -> bool:
    """Returns whether one of our tensors equals a single one of the folder in dtype and order, and is frozen."""
    alike = len(parts) == 1 and not mapping.transposed and parts[0].dtype == ours.dtype and parts[0].device == ours.device
    return alike and not ours.requires_grad and get_cut(ours) is None
