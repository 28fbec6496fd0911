"""The weights that a new run starts with where `model.init_from` names a model in Hugging Face's layout.

Read are `config.json`, `model.safetensors` or the files that `model.safetensors.index.json` names, and `tokenizer.json`, to
see that the run's ids mean the same. Nothing is unpickled.

    start_from(model, "/models/llama", tokenizer=job.prepared / "tokenizer", log=print)
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import from_hugging_face
from raystride.model.hugging_face_config import check_description
from raystride.model.transformer import Decoder
from raystride.pipelines.config import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import INDEX, WEIGHTS, fetched, named_files, read_description
from raystride.pipelines.tokenizers import load_tokenizer
from raystride.pipelines.tokenizers.chat import parse_tokenizer
from raystride.pipelines.tokenizers.loading import PROBE


def start_from(model: nn.Module, place: str, tokenizer: Folder, log: Callable[[str], None]) -> None:
    """Gives a fresh model the weights of a folder or of a name on the hub; `tokenizer` is that of the run's data.

    Raises SettingError where it cannot be read, or is another model or has another tokenizer.
    """
    if not isinstance(model, Decoder):
        raise SettingError(
            f"model.init_from is {place!r}: it must be None for a task that trains no decoder",
            setting="model.init_from",
            value=place,
        )
    try:
        check_description(model.shape, read_description(place))  # before any weight is fetched
        folder = fetched(place)
    except ValueError as error:
        raise SettingError(f"model.init_from is {place!r}: {error}", setting="model.init_from", value=place) from error
    except FileNotFoundError as error:
        raise SettingError(
            f"model.init_from is {place!r}: there is no config.json in it, nor a model of the hub",
            setting="model.init_from",
            value=place,
        ) from error
    # Only then may rows be cut off: Qwen2.5 0.5B has 151,936 for the 151,665 ids of its tokenizer.
    same_ids = folder.exists("tokenizer.json")
    if same_ids:
        _check_tokenizer(folder, tokenizer)
    from safetensors import SafetensorError

    with tempfile.TemporaryDirectory() as copies:
        try:
            description, tensors = folder.read_json("config.json"), _Tensors(folder, Path(copies))
            from_hugging_face(model, description, tensors, spare_ids=same_ids)
        except (ValueError, FileNotFoundError, SafetensorError) as error:
            raise _error(folder, str(error)) from error
    spare = description.get("vocab_size", 0) - model.vocabulary_size
    log(f"weights from {folder}" + (f", but for {spare} ids that its tokenizer does not have" if spare > 0 else ""))


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Folder, copies: Path) -> None:
        from safetensors import safe_open

        if folder.exists(INDEX):
            files = named_files(folder.read_json(INDEX))
        elif folder.exists(WEIGHTS):
            files = [WEIGHTS]
        else:
            raise ValueError(f"it has neither {WEIGHTS} nor {INDEX}, and pickled weights are not read: save as safetensors")
        self._homes: dict[str, Any] = {}
        for file in files:
            if not folder.exists(file):
                raise ValueError(f"it has no {file}, which {INDEX} names")
            place = folder.local / file if folder.local else copies / file
            if not folder.local:
                folder.download(file, place)
            opened: Any = safe_open(str(place), framework="pt")
            self._homes |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._homes[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _check_tokenizer(folder: Folder, tokenizer: Folder) -> None:
    theirs = parse_tokenizer(folder.read("tokenizer.json").decode()).encode(PROBE, add_special_tokens=False).ids
    if theirs != load_tokenizer(tokenizer).encode(PROBE).tolist():
        raise _error(
            folder,
            "its tokenizer gives other ids than the run's: train with its own, --tokenizer.kind file "
            f"--tokenizer.file {folder / 'tokenizer.json'}",
        )


def _error(folder: Folder, what: str) -> SettingError:
    return SettingError(f"model.init_from is {folder.uri!r}: {what}", setting="model.init_from", value=folder.uri)
