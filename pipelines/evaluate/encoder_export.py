"""Exports a classifier that is a Hugging Face encoder: weights, labels, and its original tokenizer.

description, tensors = describe_encoder(opened, base)     # for AutoModelForSequenceClassification
content, names = build_encoder_tokenizer(opened, content, end="[SEP]", base=base)
"""

import json
from typing import TYPE_CHECKING, Any

from raystride.model.hugging_face_encoders import ENCODER_FAMILIES
from raystride.model.shape import ENCODERS
from raystride.pipelines.config import SettingError
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.pretrained import BaseReference
from raystride.pipelines.tokenizers.chat import parse_tokenizer

if TYPE_CHECKING:
    import torch

_PADDING, _UNKNOWN, _MASK = ("[PAD]", "<pad>"), ("[UNK]", "<unk>"), ("[MASK]", "<mask>")
"""Spellings of these tokens in such tokenizers."""


def is_encoder(opened: LoadedModel) -> bool:
    """Returns True if a run's model is a Hugging Face encoder with a classifier's head."""
    return opened.config.task == "classification" and opened.config.model.architecture in ENCODERS


def describe_encoder(opened: LoadedModel, base: BaseReference | None) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """Returns the content of `config.json`, with the data's labels, and the weights.

    Raises SettingError if the layout cannot express the model.
    """
    from raystride.model.classifier import Classifier
    from raystride.model.hugging_face import encoder_to_hugging_face

    assert isinstance(opened.model, Classifier)
    family = base.family if base and opened.config.model.family == "auto" else "auto"
    labels = list(opened.task.facts["labels"])
    try:
        description, tensors = encoder_to_hugging_face(opened.model, labels, _find_padding_id(opened, base), family=family)
    except ValueError as error:
        raise SettingError.from_error(error) from error
    if base and description["model_type"] == "modernbert":  # rotations have no end, and the base's context is the longer one
        description["max_position_embeddings"] = max(base.context, description["max_position_embeddings"])
    return description, tensors


def _find_padding_id(opened: LoadedModel, base: BaseReference | None) -> int | None:
    """Returns the id that pads texts: the base's, or that of its tokenizer's padding token; None: that of the family."""
    if base:
        return ENCODER_FAMILIES[base.family].padding if base.padding is None else base.padding  # type: ignore[index]
    if opened.config.tokenizer.kind != "file":
        return opened.encoder.end_id
    tokenizer = parse_tokenizer((opened.place / "tokenizer").read("tokenizer.json").decode())
    return next((number for name in _PADDING if (number := tokenizer.token_to_id(name)) is not None), None)


def build_encoder_tokenizer(
    opened: LoadedModel, content: str, end: str, base: BaseReference | None
) -> tuple[str, dict[str, Any]]:
    """Returns the text of `tokenizer.json` and the further entries of `tokenizer_config.json`.

    `content` is that of an export without special tokens around texts; they are restored as in the run's texts.
    """
    first, last = opened.task.facts.get("around", ([], []))
    if first or last:
        own_tokenizer = json.loads((opened.place / "tokenizer").read("tokenizer.json"))
        content = json.dumps(json.loads(content) | {"post_processor": own_tokenizer["post_processor"]}, ensure_ascii=False)
    tokenizer = parse_tokenizer(content)
    token_names = [(key, name) for key, spellings in (("unk_token", _UNKNOWN), ("mask_token", _MASK)) for name in spellings]
    names: dict[str, str | None] = {key: name for key, name in token_names if tokenizer.token_to_id(name) is not None}
    padding = _find_padding_id(opened, base)
    names["pad_token"] = (tokenizer.id_to_token(padding) if padding is not None else None) or end
    names |= {"cls_token": tokenizer.id_to_token(first[0])} if first else {}
    names |= {"sep_token": tokenizer.id_to_token(last[-1])} if last else {}
    # Inputs are single texts, and DistilBERT takes no segments.
    return content, {**names, "model_input_names": ["input_ids", "attention_mask"]}
