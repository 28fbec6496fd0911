"""Exports a finished run as a folder that `transformers` loads: safetensors, `config.json`, tokenizer and chat template.

Every kind of tokenizer becomes a `tokenizer.json`: bytes and characters as a BPE without merges, others unchanged but for
special tokens that they would add around a text and that training did not use. A classifier that is a Hugging Face encoder
keeps its original tokenizer, and its labels are in `config.json`. All ids that end an answer are in `config.json` and
`generation_config.json`.

    folder = export_hugging_face(open_run(storage, "my-run"), storage / "my-run" / "export" / "hugging_face")
    transformers.AutoModelForCausalLM.from_pretrained(str(folder))    # an encoder: AutoModelForSequenceClassification
"""

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.model.hugging_face import to_hugging_face
from raystride.model.hugging_face_layout import encoder_names
from raystride.pipelines.config import SettingError
from raystride.pipelines.data.pretrained import BaseReference, find_base
from raystride.pipelines.data.tokenizers.byte_pairs import END_TOKEN, UNKNOWN_TOKEN, ByteEncoder, CharacterEncoder
from raystride.pipelines.data.tokenizers.chat import FILE as CHAT_FILE
from raystride.pipelines.data.tokenizers.chat import parse_tokenizer
from raystride.pipelines.data.tokenizers.loading import KIND_FILE, READY_FILE
from raystride.pipelines.data.tokenizers.template import export_template
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    import torch
from typing import TYPE_CHECKING

from raystride.model.hugging_face_encoders import ENCODER_FAMILIES
from raystride.model.shape import ENCODERS

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


_TOKENIZER_FILES = (READY_FILE, "tokenizer_config.json", "chat_template.jinja")
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", *_TOKENIZER_FILES)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "generation_config.json", *_TOKENIZER_FILES)
"""Files of an export; its folder may hold others."""


def export_hugging_face(opened: LoadedModel, folder: Folder) -> Folder:
    """Writes a run's model and tokenizer into a folder and returns it; `config.json` comes last.

    Raises SettingError if the layout cannot express the model.
    """
    base = find_base(opened.config.model)
    if is_encoder(opened):
        return _export_encoder(opened, folder, base)
    family = base.family if base and opened.config.model.family == "auto" else "auto"
    try:
        description, tensors = to_hugging_face(opened.decoder, opened.encoder.end_id, family=family)
    except ValueError as error:
        raise SettingError.from_error(error) from error
    if base:
        _check_base_names(base, tensors.keys() - {"lm_head.weight"}, "")  # a tied base may have got a head of its own
        if "max_position_embeddings" in description:  # rotations have no end, and the base's context is the longer one
            description["max_position_embeddings"] = max(base.context, description["max_position_embeddings"])
    _write_weights(tensors, folder)
    _write_tokenizer(opened, base, folder)
    ids = _token_ids(opened)
    folder.put_json("generation_config.json", ids)
    folder.put_json("config.json", description | {name: ids[name] for name in ("bos_token_id", "eos_token_id")})
    return folder


def _export_encoder(opened: LoadedModel, folder: Folder, base: BaseReference | None) -> Folder:
    """Exports a classifier that is an encoder."""
    description, tensors = describe_encoder(opened, base)
    if base:
        _check_base_names(base, encoder_names(description["model_type"], tensors), "")
    _write_weights(tensors, folder)
    _write_tokenizer(opened, base, folder)
    folder.put_json("config.json", description)
    return folder


def _write_weights(tensors: "dict[str, torch.Tensor]", folder: Folder) -> None:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        folder.upload(file, file.name)


def export_adapter(opened: LoadedModel, folder: Folder) -> Folder:
    """Writes a run's adapters and its tokenizer into a folder that PEFT loads, and returns it.

    Raises SettingError if no layout has the network.
    """
    from raystride.pipelines.train.lora.peft import adapted_layers, write_adapter

    base = find_base(opened.config.model)
    if base:
        names = {f"{name}.weight" for name in adapted_layers(opened.model)}
        _check_base_names(base, names, "; export the whole model, --merge true")
    _write_tokenizer(opened, base, folder)
    if not is_encoder(opened):
        folder.put_json("generation_config.json", _token_ids(opened))  # its base may end answers otherwise
    return write_adapter(opened.model, opened.config.lora, folder, base=opened.config.model.init_from or "")


def _check_base_names(base: BaseReference, names: Collection[str], remedy: str) -> None:
    """Raises SettingError for names of tensors that the base does not have: other programs would ignore them silently."""
    if unknown := sorted(set(names) - base.tensors):
        raise SettingError(
            f"model.init_from is {base.path_or_name!r}: it has no tensor {unknown[0]}, which the export would write under "
            "that name" + remedy,
            setting="model.init_from",
            value=base.path_or_name,
        )


def _token_ids(opened: LoadedModel) -> dict[str, Any]:
    """Returns the ids with which transformers begins, ends and pads its texts: the base's, and all that end an answer."""
    end, base = opened.encoder.end_id, opened.task.facts.get("base_ids", {})
    # A document begins after the end token of the one before it, and so does a text without a prompt.
    first = {"bos": (*base.get("bos", ()), *opened.encoder.begin_ids, end)[0], "pad": (*base.get("pad", ()), end)[0]}
    end_ids = [number for number in opened.task.end_ids if number < opened.decoder.vocabulary_size]
    if not opened.task.writes_chats:
        end_ids = [end, *(number for number in end_ids if number != end)]
    named_ids = {f"{name}_token_id": number for name, number in first.items()}
    return named_ids | {"eos_token_id": end_ids if len(end_ids) > 1 else end_ids[0]}


def _write_tokenizer(opened: LoadedModel, base: BaseReference | None, folder: Folder) -> None:
    content, end = _build_tokenizer_json(opened)
    if is_encoder(opened):
        content, names = build_encoder_tokenizer(opened, content, end, base)
    else:
        names = _token_names(opened, content, end, folder)
    folder.put(READY_FILE, content)
    folder.put_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": opened.config.model.context,
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )


def _token_names(opened: LoadedModel, content: str, end: str, folder: Folder) -> dict[str, Any]:
    """Returns the names of a decoder's tokens for `tokenizer_config.json`; writes its chat template, if it has one."""
    ids, tokenizer = _token_ids(opened), parse_tokenizer(content)
    names: dict[str, Any] = {"eos_token": end, "bos_token": tokenizer.id_to_token(ids["bos_token_id"]) or end}
    if ids["pad_token_id"] != opened.encoder.end_id and (padding := tokenizer.id_to_token(ids["pad_token_id"])):
        names["pad_token"] = padding
    if isinstance(opened.encoder, CharacterEncoder):
        names["unk_token"] = UNKNOWN_TOKEN
    place = opened.place / "tokenizer"
    if place.exists(CHAT_FILE):
        chat = place.read_json(CHAT_FILE)
        folder.put("chat_template.jinja", export_template(chat))
        names |= chat["tokens"]
        if "eos_token" not in chat["template"] or "eos_token" not in chat["tokens"]:  # else it writes that one
            first = opened.task.end_ids[0] if opened.task.writes_chats else opened.encoder.end_id
            names["eos_token"] = tokenizer.id_to_token(first) or end
    return names


def _build_tokenizer_json(opened: LoadedModel) -> tuple[str, str]:
    """Returns the text of `tokenizer.json`, and the name of the end token in it."""
    encoder = opened.encoder
    if isinstance(encoder, ByteEncoder):
        return _byte_tokenizer_json(encoder), END_TOKEN
    if isinstance(encoder, CharacterEncoder):
        return _character_tokenizer_json(encoder), END_TOKEN
    place = opened.place / "tokenizer"
    content = json.loads(place.read(READY_FILE)) | {"truncation": None, "padding": None}
    if not encoder.begin_ids:
        content["post_processor"] = None
    return json.dumps(content, ensure_ascii=False), place.read_json(KIND_FILE)["end_token"]


def _byte_tokenizer_json(encoder: ByteEncoder) -> str:
    """Builds a tokenizer without characters, so that each falls back to its bytes."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(encoder.token_ids, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([END_TOKEN])
    return str(tokenizer.to_str())


def _character_tokenizer_json(encoder: CharacterEncoder) -> str:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(encoder.token_ids, [], unk_token=UNKNOWN_TOKEN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_TOKEN, UNKNOWN_TOKEN])
    return str(tokenizer.to_str())
