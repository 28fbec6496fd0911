"""A finished run as a folder that `transformers` loads: safetensors, `config.json`, and a tokenizer with its chat template.

Every kind of tokenizer becomes a `tokenizer.json`: bytes and characters as a BPE without merges, others as they are but for
the special tokens that they would add around a text, which the model never saw in training.

    folder = export_hugging_face(open_run(storage, "my-run"), storage / "my-run" / "export" / "hugging_face")
    transformers.AutoModelForCausalLM.from_pretrained(str(folder))
"""

import json
import tempfile
from pathlib import Path

from raystride.model.hugging_face import to_hugging_face
from raystride.pipelines.config import SettingError
from raystride.pipelines.evaluate.opening import Opened
from raystride.pipelines.files import Folder
from raystride.pipelines.tokenizers.alphabets import ByteEncoder, CharacterEncoder
from raystride.pipelines.tokenizers.chat import FILE as CHAT_FILE
from raystride.pipelines.tokenizers.loading import KIND_FILE, READY_FILE

_OF_TOKENIZER = (READY_FILE, "tokenizer_config.json", "chat_template.jinja")
OF_MODEL = ("config.json", "generation_config.json", "model.safetensors", *_OF_TOKENIZER)
OF_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", *_OF_TOKENIZER)
"""Files of an export, of which a folder may hold others beside."""
END, UNKNOWN = "<|end|>", "<|unknown|>"
"""What the two tokens without a text are called where the tokenizer has no names of its own."""


def export_hugging_face(opened: Opened, folder: Folder) -> Folder:
    """Writes a run's model and tokenizer into a folder and returns it; `config.json` comes last.

    Raises SettingError where the layout cannot say what the model is.
    """
    from safetensors.torch import save_file

    try:
        description, tensors = to_hugging_face(opened.decoder, opened.encoder.end_id)
    except ValueError as error:
        raise SettingError.of(error) from error
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        folder.upload(file, file.name)
    _write_tokenizer(opened, folder)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), opened.encoder.end_id)
    folder.put_json("generation_config.json", ids)
    folder.put_json("config.json", description)
    return folder


def export_adapter(opened: Opened, folder: Folder) -> Folder:
    """Writes a run's adapters and its tokenizer into a folder that PEFT loads, and returns it.

    Raises SettingError where no layout has the network.
    """
    from raystride.pipelines.train.peft import write_adapter

    _write_tokenizer(opened, folder)
    return write_adapter(opened.model, opened.config.lora, folder, base=opened.config.model.init_from or "")


def _write_tokenizer(opened: Opened, folder: Folder) -> None:
    content, end = _tokenizer(opened)
    folder.put(READY_FILE, content)
    # A document begins after the end token of the one before it, and so does what is written without a prompt.
    names = {"eos_token": end, "bos_token": end}
    if isinstance(opened.encoder, CharacterEncoder):
        names["unk_token"] = UNKNOWN
    tokenizer = opened.place / "tokenizer"
    if tokenizer.exists(CHAT_FILE):
        chat = tokenizer.read_json(CHAT_FILE)
        folder.put("chat_template.jinja", chat["template"])
        names |= chat["tokens"] | {"eos_token": end}
    folder.put_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": opened.config.model.context,
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )


def _tokenizer(opened: Opened) -> tuple[str, str]:
    """The text of `tokenizer.json`, and the name of the end token in it."""
    encoder = opened.encoder
    if isinstance(encoder, ByteEncoder):
        return _bytes(encoder), END
    if isinstance(encoder, CharacterEncoder):
        return _characters(encoder), END
    place = opened.place / "tokenizer"
    content = json.loads(place.read(READY_FILE))
    content |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(content, ensure_ascii=False), place.read_json(KIND_FILE)["end_token"]


def _bytes(encoder: ByteEncoder) -> str:
    """No character is a token, so that each falls back to its bytes."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary | {END: encoder.end_id}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([END])
    return str(tokenizer.to_str())


def _characters(encoder: CharacterEncoder) -> str:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {character: number for number, character in enumerate(encoder.characters, 2)}
    vocabulary |= {END: encoder.end_id, UNKNOWN: encoder.unknown_id}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, UNKNOWN])
    return str(tokenizer.to_str())
