"""Downloads models from the Hugging Face hub into its client's cache, and uploads models.

A name is `org/name`, or `org/name@revision`: a branch, a tag or a commit. The client (`huggingface_hub`) caches files
(`HF_HOME`) and works offline if they are cached, and always under `HF_HUB_OFFLINE=1`. All files of one download are of one
commit. A folder is no hub name: its path begins with `/`, or it exists.

    description = read_description("Qwen/Qwen3-0.6B")        # config.json alone
    folder = fetch_model("Qwen/Qwen3-0.6B@main")             # with weights and tokenizer
    url = push(folder, ["config.json", "model.safetensors"], "me/my-model", "# My model")
"""

import json
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.retries import retry

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(@[\w.][\w./-]*)?", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
"""Generation settings of `transformers`: the ids that end a text, for instance."""
ADAPTER = "adapter_config.json"
"""Describes an adapter, and names its base."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""A tokenizer's files; only the first is required."""


def is_hub_name(path_or_name: str) -> bool:
    """Returns whether a text has the form of a hub name. A relative path may have it, too."""
    return _NAME.fullmatch(path_or_name) is not None


def fetch_model(path_or_name: str) -> Folder:
    """Returns a model's folder: the given one, or a download of the hub's model, without files that are not read.

    Raises ValueError if the hub has no such model, refuses it, or cannot be reached.
    """
    if not is_hub_name(path_or_name):
        return Folder(path_or_name)
    folder, commit = _fetch_first(path_or_name, "config.json")
    for name in TOKENIZER:
        _fetch_file(path_or_name, name, commit, needed=False)
    if _fetch_file(path_or_name, INDEX, commit, needed=False):
        for name in files_in_index(folder.read_json(INDEX)):
            _fetch_file(path_or_name, name, commit)
    else:
        _fetch_file(path_or_name, WEIGHTS, commit, needed=False)  # the reader reports missing weights
    return folder


def remote_tensors(path_or_name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each tensor of a hub model, by its name there, without fetching the weights.

    Raises ValueError as `fetch_model` does, and if the model has no safetensors or damaged ones.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    model, revision = name_and_revision(path_or_name)
    with _explain_hub_errors(path_or_name):
        try:
            found = retry(lambda: HfApi().get_safetensors_metadata(model, revision=revision))
        except NotASafetensorsRepoError:
            raise ValueError(
                f"the hub's model has neither {WEIGHTS} nor {INDEX}, and pickled weights are not read"
            ) from None
        except SafetensorsParsingError as error:
            raise ValueError(f"the hub's model has damaged weights: {error}") from None
    tensors = [file_tensors.tensors for file_tensors in found.files_metadata.values()]
    return {name: (str(info.dtype), tuple(info.shape)) for file_tensors in tensors for name, info in file_tensors.items()}


def fetch_tokenizer(path_or_name: str) -> Folder:
    """Downloads a hub model's tokenizer; returns its folder. Raises ValueError as `fetch_model` does, or if it has none."""
    folder, commit = _fetch_first(path_or_name, TOKENIZER[0])
    for name in (*TOKENIZER[1:], GENERATION, "config.json"):
        _fetch_file(path_or_name, name, commit, needed=False)
    return folder


def read_description(path_or_name: str) -> Any:
    """Returns the `config.json` of a folder or hub model. Raises ValueError as `fetch_model` does, or FileNotFoundError."""
    return (_fetch_first(path_or_name, "config.json")[0] if is_hub_name(path_or_name) else Folder(path_or_name)).read_json(
        "config.json"
    )


def read_token_ids(path_or_name: str) -> dict[str, list[int]]:
    """Returns the ids that begin (`bos`), end (`eos`) and pad (`pad`) a text for the model of a folder or the hub.

    They come from its `generation_config.json`, else its `config.json`. Empty if it has no tokenizer, since they then mean
    nothing. Raises as `read_description` does.
    """
    described = read_description(path_or_name)
    if is_hub_name(path_or_name):
        folder, commit = _fetch_first(path_or_name, "config.json")
        for name in (TOKENIZER[0], GENERATION):
            _fetch_file(path_or_name, name, commit, needed=False)
    else:
        folder = Folder(path_or_name)
    if not folder.exists(TOKENIZER[0]):
        return {}
    generation = folder.read_json(GENERATION) if folder.exists(GENERATION) else {}
    found = {name: generation.get(f"{name}_token_id", described.get(f"{name}_token_id")) for name in ("bos", "eos", "pad")}
    listed = {name: ids if isinstance(ids, list) else [ids] for name, ids in found.items() if ids is not None}
    # transformers pads by -1 in places, and some folders name ids that their models do not have.
    known = {
        name: [token_id for token_id in ids if 0 <= token_id < described.get("vocab_size", 0)]
        for name, ids in listed.items()
    }
    return {name: ids for name, ids in known.items() if ids}


def files_in_index(index: Any) -> list[str]:
    """Returns the file names in an index of weights, sorted.

    Raises ValueError for a name that leads out of its folder.
    """
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict):
        raise ValueError(f"its {INDEX} has no weight_map")
    for file in named.values():
        if not isinstance(file, str) or not file or set(file) & set("/\\\0") or file.startswith("."):
            raise ValueError(f"its {INDEX} names {file!r}, which is no plain name of a file beside it")
    return sorted(set(named.values()))


def name_and_revision(path_or_name: str) -> tuple[str, str | None]:
    """Splits a hub name into the model and the revision; None if it names none."""
    model, _, revision = path_or_name.partition("@")
    return model, revision or None


def push(folder: Folder, files: Collection[str], name: str, card: str) -> str:
    """Uploads these files, as far as the folder has them, and a model card in one commit; returns the model's URL.

    A new model is created, visible to its owner alone. Raises ValueError if the hub refuses it.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as copies, _explain_hub_errors(name):
        for file in {*files} & {*folder.names()}:
            folder.download(file, Path(copies) / file)
        if (described := Path(copies) / ADAPTER).exists():
            described.write_text(json.dumps(_without_local_base(json.loads(described.read_text())), indent=2))
        (Path(copies) / "README.md").write_text(card)
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=copies, commit_message="A model trained by Raystride")
    return str(address)


def _without_local_base(description: dict[str, Any]) -> dict[str, Any]:
    """Returns an adapter's description, without its base if that is no hub model."""
    base = description.get("base_model_name_or_path")
    return description | {"base_model_name_or_path": base if is_hub_name(base or "") else None}


def _fetch_first(path_or_name: str, name: str) -> tuple[Folder, str]:
    """Fetches the first file of a model; returns its folder, and the commit for all other files."""
    _, _, revision = path_or_name.partition("@")
    path = _fetch_file(path_or_name, name, revision or "main")
    assert path is not None
    return Folder(str(path.parent)), path.parent.name


def _fetch_file(path_or_name: str, name: str, revision: str, *, needed: bool = True) -> Path | None:
    """Returns the path of a file in the client's cache, fetched if necessary; None if an optional one does not exist."""
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    model = path_or_name.partition("@")[0]
    # The client caches which files a commit lacks, but would ask for them again, and fail without a network.
    if not needed and try_to_load_from_cache(model, name, revision=revision) is _CACHED_NO_EXIST:
        return None
    with _explain_hub_errors(path_or_name):
        try:
            return Path(retry(lambda: hf_hub_download(model, name, revision=revision)))
        except RemoteEntryNotFoundError as error:
            if needed:
                raise ValueError(f"the hub's model has no {name}") from error
            return None
        except LocalEntryNotFoundError:
            if needed or not constants.is_offline_mode():
                raise
            return None


@contextmanager
def _explain_hub_errors(path_or_name: str) -> Iterator[None]:
    """Turns the client's errors into ValueErrors with a remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{path_or_name.partition('@')[0]}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"the hub gives it only to who accepted its terms: do so at {page}, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"the hub's model has no revision {path_or_name.partition('@')[2] or 'main'}: see {page}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no such folder, and no such model at {page} that this login may see (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        raise ValueError(f"there is no such folder, it is not in {constants.HF_HUB_CACHE}, and {why}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise ValueError(f"the hub refuses it: {str(error).splitlines()[0]}") from error
