"""Checks and loads the pretrained base of a run in Hugging Face's layout (`model.init_from`).

It reads `config.json`, `model.safetensors` or the files in `model.safetensors.index.json`, and `tokenizer.json`, to check
that the run's token ids are the base's. Nothing is unpickled. The driver checks the headers of the weights alone, without
PyTorch; workers load them.

    base = check_base(config, "/models/llama")               # BaseInfo: "llama, 1,235,814,400 parameters, ..."
    load_base_weights(model, "/models/llama", tokenizer=job.prepared / "tokenizer", log=print)
"""

import json
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.model.hugging_face_config import (
    check_description,
    complete_description,
    described_type,
    is_encoder_type,
    trained_context,
)
from raystride.model.hugging_face_layout import NO_WEIGHT, check_tensors, full_names, layout_of
from raystride.pipelines.config import Config, ModelConfig, SettingError, TokenizerConfig
from raystride.pipelines.config.base_model import is_run, settings_from_description
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.stored_run import read_settings
from raystride.pipelines.data.first_bytes import HEAD_BYTES, describe_foreign_format
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.data.tokenizers.chat import parse_tokenizer
from raystride.pipelines.data.tokenizers.loading import PROBE
from raystride.pipelines.data.tokenizers.ready import embedding_size
from raystride.pipelines.data.tokenizers.training import read_file
from raystride.pipelines.system.hub import (
    INDEX,
    WEIGHTS,
    fetch_model,
    files_in_index,
    is_hub_name,
    read_description,
    remote_tensors,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.writer import WrittenByNewer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import nn

DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of weights, by safetensors' names."""
MAX_HEADER_BYTES = 100 << 20
"""The largest header that safetensors itself reads."""
TensorSizes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a folder, by its name there."""


@dataclass(frozen=True)
class BaseInfo:
    """A pretrained base model, as its folder describes it."""

    family: str
    """Hugging Face's `model_type`."""
    parameters: int
    context: int
    """Context length that it was trained with, in tokens; 0 if unknown."""
    vocabulary_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `model` and `tokenizer` that come from its folder and differ from the defaults, by full names."""

    def __str__(self) -> str:
        trained = f", trained on {self.context:,} tokens at once" if self.context else ""
        return f"{self.family}, {self.parameters:,} parameters, vocabulary {self.vocabulary_size:,}{trained}"


def check_base(config: Config, path_or_name: str) -> BaseInfo:
    """Checks a base by its description and the headers of its weights, before anything is prepared.

    Raises SettingError if it cannot be read, is another network than the settings', has missing or extra weights,
    unsupported dtypes, or another tokenizer.
    """
    try:
        description = _read_description(path_or_name)
        _check_task(config.task, config.tokenizer, path_or_name, description)
        check_description(config.model, description)
        tensors = remote_tensors(path_or_name) if is_hub_name(path_or_name) else read_headers(Folder(path_or_name))
        _check_types(tensors)
        tokenizer = parse_tokenizer(read_file(config.tokenizer)) if config.tokenizer.kind == "file" else None
        same_ids = tokenizer is not None and _is_base_tokenizer(tokenizer, config.tokenizer, path_or_name)
        if tokenizer:
            _check_added_tokens(tokenizer, tensors, same_ids)
        vocabulary_size = embedding_size(tokenizer) if tokenizer else None
        sizes = {name: shape for name, (_, shape) in tensors.items()}
        completed = complete_description(description)
        check_tensors(config.model, completed, sizes, vocabulary_size=vocabulary_size, spare_ids=same_ids)
    except SettingError:
        raise
    except FileNotFoundError:
        raise _init_from_error(path_or_name, "there is no config.json in it, nor a model of the hub") from None
    except ValueError as error:
        raise _init_from_error(path_or_name, str(error)) from error
    weights = sum(math.prod(shape) for name, shape in sizes.items() if not NO_WEIGHT.search(name))
    rows = completed.get("vocab_size") or vocabulary_size or 0
    plain = Config().flat() | {"task": config.task, "model.init_from": config.model.init_from}
    described, now = settings_from_description(path_or_name, description, plain, {"model.init_from"}), config.flat()
    settings = {name: now[name] for name, value in described.items() if now[name] == value}
    return BaseInfo(described_type(description), weights, trained_context(description), rows, settings)


def _read_description(path_or_name: str) -> Any:
    """Returns the `config.json` of a base. Raises ValueError with what it is if it is no JSON, or FileNotFoundError."""
    try:
        return read_description(path_or_name)
    except json.JSONDecodeError as error:
        described = describe_foreign_format(error.doc[:HEAD_BYTES].encode(errors="replace"))
        raise ValueError(f"its config.json {described or f'is no JSON: {error}'}") from error


def _check_task(task: str, tokenizer: TokenizerConfig, path_or_name: str, description: Mapping[str, Any]) -> None:
    """Raises SettingError if a base does not fit the task, or is an encoder without its tokenizer."""
    kind = described_type(description)
    if not is_encoder_type(kind):
        if task not in DECODERS:
            raise _init_from_error(
                path_or_name, f"it must be a run's folder, or hold an encoder, with task `{task}`, and it is a {kind}"
            )
        return
    if task != "classification":
        raise _init_from_error(
            path_or_name, f"it must be a decoder with task `{task}`, and it is a {kind}, for task `classification`"
        )
    if tokenizer.kind != "file" and not is_hub_name(path_or_name) and not Folder(path_or_name).exists("tokenizer.json"):
        raise _init_from_error(
            path_or_name,
            "it has no tokenizer.json, which knows its words: have transformers write one, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )


@dataclass(frozen=True)
class BaseReference:
    """The readable base that a run started from; an export uses its tensor names."""

    path_or_name: str
    family: str
    context: int
    """Context length that it was trained with, in tokens; 0 if unknown."""
    padding: int | None
    """The padding id; None if unknown."""
    tensors: frozenset[str]
    """Full names of its tensors."""


def find_base(model: ModelConfig) -> BaseReference | None:
    """Returns the base of a run, also through a chain of runs; None if it has no base or it cannot be read."""
    path_or_name = model.init_from
    try:
        if not path_or_name:
            return None
        if is_run(path_or_name):
            return find_base(read_settings(Folder(path_or_name)).model)
        description = read_description(path_or_name)
        kind = described_type(description)
        stored = remote_tensors(path_or_name) if is_hub_name(path_or_name) else read_headers(Folder(path_or_name))
    except WrittenByNewer:
        raise
    except (OSError, ValueError):
        return None
    names = full_names(layout_of(model, kind), stored)
    return BaseReference(path_or_name, kind, trained_context(description), description.get("pad_token_id"), frozenset(names))


def read_headers(folder: Folder) -> TensorSizes:
    """Returns the tensors of a folder, read from the headers of its files.

    Raises ValueError, with a message about the folder, if a file is missing, truncated, or no safetensors.
    """
    found: TensorSizes = {}
    for file in _weight_files(folder):
        bytes_there = folder.size(file)
        assert bytes_there is not None  # `_weight_files` has checked
        length = int.from_bytes(_read_bytes(folder, file, 0, 8), "little") if bytes_there >= 8 else MAX_HEADER_BYTES
        if length > min(MAX_HEADER_BYTES, bytes_there - 8):
            if described := describe_foreign_format(_read_bytes(folder, file, 0, min(HEAD_BYTES, bytes_there))):
                raise ValueError(f"its {file} {described}")
            raise ValueError(f"its {file} is truncated, or no safetensors: it has {bytes_there:,} bytes")
        try:
            header = json.loads(_read_bytes(folder, file, 8, 8 + length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"its {file} has no header of safetensors ({error})") from None
        if 8 + length + end != bytes_there:
            raise ValueError(f"its {file} is truncated: it has {bytes_there:,} bytes of {8 + length + end:,}; copy it again")
    return found


def _read_bytes(folder: Folder, name: str, start: int, stop: int) -> bytes:
    return b"".join(folder.read_chunks(name, start, stop))


def _weight_files(folder: Folder) -> list[str]:
    """Returns the names of the weight files. Raises ValueError if one is missing, or no file."""
    if folder.exists(INDEX):
        files = files_in_index(folder.read_json(INDEX))
    elif folder.exists(WEIGHTS):
        files = [WEIGHTS]
    else:
        raise ValueError(f"it has neither {WEIGHTS} nor {INDEX}, and pickled weights are not read: save as safetensors")
    for file in files:
        if folder.size(file) is None:
            raise ValueError(f"its {file} is no file" if folder.exists(file) else f"it has no {file}, which {INDEX} names")
    return files


def _check_types(tensors: TensorSizes) -> None:
    """Raises ValueError for weights of an unsupported dtype."""
    for name, (dtype, _) in tensors.items():
        if dtype not in DTYPES and not NO_WEIGHT.search(name):
            raise ValueError(
                f"its tensor {name} is {dtype}, and only {', '.join(DTYPES)} are read: if it is quantised, dequantise it "
                "first, AutoModelForCausalLM.from_pretrained(...).dequantize(), and save that"
            )


def _is_base_tokenizer(tokenizer: "Tokenizer", settings: TokenizerConfig, path_or_name: str) -> bool:
    """Returns whether a tokenizer is the base's own; False if the base has none. Raises ValueError for a different one."""
    if is_hub_name(path_or_name):
        return settings.file == path_or_name  # workers fetch the tokenizer and compare others
    folder = Folder(path_or_name)
    if not folder.exists("tokenizer.json"):
        return False
    _check_same_ids(folder, tokenizer.encode(PROBE, add_special_tokens=False).ids)
    return True


def _check_added_tokens(tokenizer: "Tokenizer", tensors: TensorSizes, same_ids: bool) -> None:
    """Raises ValueError if the base's own tokenizer has ids without a row in its embedding."""
    embeddings = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
    rows = next((shape[0] for name, (_, shape) in tensors.items() if name.endswith(embeddings)), 0)
    if same_ids and rows and (more := embedding_size(tokenizer) - rows) > 0:
        extra_tokens = [token for token, number in tokenizer.get_vocab(with_added_tokens=True).items() if number >= rows]
        named = ", ".join(sorted(extra_tokens)[:4]) + (", ..." if len(extra_tokens) > 4 else "")
        raise ValueError(
            f"its tokenizer has {more} ids more than its embedding ({named}): resize it in transformers, "
            "model.resize_token_embeddings(len(tokenizer)), or take them out"
        )


def load_base_weights(
    model: "nn.Module",
    path_or_name: str,
    tokenizer: Folder,
    log: Callable[[str], None],
    *,
    labels: Sequence[str] = (),
    share_frozen: bool = False,
) -> None:
    """Loads the weights of a folder or a hub model into a fresh model; `tokenizer` is the folder of the run's tokenizer.

    `labels` are a classifier's, by number; `share_frozen` as in `from_hugging_face`, if the files are local.

    Raises SettingError if the base cannot be read, is another model, or has another tokenizer.
    """
    from safetensors import SafetensorError

    from raystride.model.classifier import Classifier
    from raystride.model.hugging_face import encoder_from_hugging_face, from_hugging_face
    from raystride.model.transformer import Decoder

    if not isinstance(model, Decoder | Classifier):
        raise _init_from_error(path_or_name, "it must be None for a task that trains no decoder and no classifier of texts")
    initialized: list[str] = []
    try:
        check_description(model.shape, _read_description(path_or_name))  # before any weight is fetched
        folder = fetch_model(path_or_name)
        _check_types(read_headers(folder))
        # Rows may be cut off only if the ids are equal: Qwen2.5 0.5B has 151,936 for the 151,665 ids of its tokenizer.
        same_ids = folder.exists("tokenizer.json")
        if same_ids:
            _check_same_ids(folder, load_tokenizer(tokenizer).encode(PROBE).tolist())
        with tempfile.TemporaryDirectory() as copies:
            description, tensors = folder.read_json("config.json"), _LazyTensors(folder, Path(copies))
            shared = share_frozen and folder.local is not None
            rules: dict[str, Any] = {"spare_ids": same_ids, "share_frozen": shared}
            if isinstance(model, Classifier):
                initialized = encoder_from_hugging_face(model, description, tensors, labels=labels, **rules)
            else:
                from_hugging_face(model, description, tensors, **rules)
    except (ValueError, SafetensorError) as error:
        raise _init_from_error(path_or_name, str(error)) from error
    except FileNotFoundError as error:
        raise _init_from_error(path_or_name, "there is no config.json in it, nor a model of the hub") from error
    positions, context = trained_context(description), model.shape.context
    if 0 < positions < context:
        log(f"warning: model.context is {context}, beyond the {positions} positions that {folder} was trained on")
    spare = description.get("vocab_size", 0) - model.embedding.num_embeddings
    log(f"weights from {folder}" + (f", but for {spare} ids that its tokenizer does not have" if spare > 0 else ""))
    if initialized:
        log(f"{' and '.join(initialized)} of the classifier: begun anew, since {folder} has none for these labels")


class _LazyTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a folder by name, loaded on access. Local files are memory-mapped."""

    def __init__(self, folder: Folder, copies: Path) -> None:
        from safetensors import safe_open

        self._files_by_tensor: dict[str, Any] = {}
        for file in _weight_files(folder):
            path_or_name = folder.local / file if folder.local else copies / file
            if not folder.local:
                folder.download(file, path_or_name)
            opened: Any = safe_open(str(path_or_name), framework="pt")
            self._files_by_tensor |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> "torch.Tensor":
        tensor: torch.Tensor = self._files_by_tensor[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files_by_tensor)

    def __len__(self) -> int:
        return len(self._files_by_tensor)


def _check_same_ids(folder: Folder, ids: Collection[int]) -> None:
    """Raises ValueError if the base's tokenizer encodes the probe text to other ids than these."""
    base_ids = parse_tokenizer(folder.read("tokenizer.json").decode()).encode(PROBE, add_special_tokens=False).ids
    if base_ids != ids:
        raise ValueError(
            "its tokenizer gives other ids than the run's: train with its own, --tokenizer.kind file "
            f"--tokenizer.file {folder / 'tokenizer.json'}"
        )


def _init_from_error(path_or_name: str, what: str) -> SettingError:
    return SettingError(f"model.init_from is {path_or_name!r}: {what}", setting="model.init_from", value=path_or_name)
