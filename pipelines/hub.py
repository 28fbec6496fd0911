"""Models on the Hugging Face hub by their names: fetched into its client's cache, and pushed.

A name is `org/name`, or `org/name@revision`: a branch, a tag or a commit. The client (`huggingface_hub`) keeps what it
fetched (`HF_HOME`), does without the network where it has it, and always so under `HF_HUB_OFFLINE=1`. All files of one fetch
are those of one commit. A folder is none of these: its path begins with `/`, or it is there.

    description = read_description("Qwen/Qwen3-0.6B")        # config.json alone
    folder = fetched("Qwen/Qwen3-0.6B@main")                 # with weights and tokenizer
    url = push(folder, ["config.json", "model.safetensors"], "me/my-model", "# My model")
"""

import json
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.retries import retried

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)(@[\w.][\w./-]*)?", re.ASCII)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""Describes an adapter, and names its base."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What of a tokenizer is read; only the first must be there."""


def is_hub_name(place: str) -> bool:
    """Whether a place is written as a name on the hub. A relative path may be, too."""
    return _NAME.fullmatch(place) is not None


def fetched(place: str) -> Folder:
    """The folder of a model: a place that is one, or what the hub has under this name, without what is not read.

    Raises ValueError where the hub has none, does not give it, or cannot be reached.
    """
    if not is_hub_name(place):
        return Folder(place)
    folder, commit = _first(place, "config.json")
    for name in TOKENIZER:
        _file(place, name, commit, needed=False)
    if _file(place, INDEX, commit, needed=False):
        for name in named_files(folder.read_json(INDEX)):
            _file(place, name, commit)
    else:
        _file(place, WEIGHTS, commit, needed=False)  # who reads it says what is missing
    return folder


def fetched_tokenizer(place: str) -> Folder:
    """The folder with the tokenizer of a name on the hub. Raises ValueError as `fetched` does, and where there is none."""
    folder, commit = _first(place, TOKENIZER[0])
    for name in TOKENIZER[1:]:
        _file(place, name, commit, needed=False)
    return folder


def read_description(place: str) -> Any:
    """The `config.json` of a model, in a folder or on the hub. Raises ValueError as `fetched` does, FileNotFoundError."""
    return (_first(place, "config.json")[0] if is_hub_name(place) else Folder(place)).read_json("config.json")


def named_files(index: Any) -> list[str]:
    """The files that an index of weights names.

    Raises ValueError for a name by which one could be read or written elsewhere.
    """
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict):
        raise ValueError(f"its {INDEX} has no weight_map")
    for file in named.values():
        if not isinstance(file, str) or not file or set(file) & set("/\\\0") or file.startswith("."):
            raise ValueError(f"its {INDEX} names {file!r}, which is no plain name of a file beside it")
    return sorted(set(named.values()))


def name_and_revision(place: str) -> tuple[str, str | None]:
    """Of a name on the hub the model and the revision, which is None where none is named."""
    model, _, revision = place.partition("@")
    return model, revision or None


def push(folder: Folder, files: Collection[str], name: str, card: str) -> str:
    """Uploads those of these files that a folder has, and a model card, in one commit; the address of the model.

    A model that is not there yet is made, visible to its owner alone. Raises ValueError where the hub refuses it.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as copies, _told(name):
        for file in {*files} & {*folder.names()}:
            folder.download(file, Path(copies) / file)
        if (described := Path(copies) / ADAPTER).exists():
            described.write_text(json.dumps(_for_others(json.loads(described.read_text())), indent=2))
        (Path(copies) / "README.md").write_text(card)
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=copies, commit_message="A model trained by Raystride")
    return str(address)


def _for_others(description: dict[str, Any]) -> dict[str, Any]:
    """An adapter's description without a base that only this machine has."""
    base = description.get("base_model_name_or_path")
    return description | {"base_model_name_or_path": base if is_hub_name(base or "") else None}


def _first(place: str, name: str) -> tuple[Folder, str]:
    """The folder of the first file that is fetched, and the commit that all others are of."""
    _, _, revision = place.partition("@")
    path = _file(place, name, revision or "main")
    assert path is not None
    return Folder(str(path.parent)), path.parent.name


def _file(place: str, name: str, revision: str, *, needed: bool = True) -> Path | None:
    """A file in the client's cache; None for one that need not be there."""
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    model = place.partition("@")[0]
    # The client keeps which files a commit does not have, and would ask for them again, and fail where nobody answers.
    if not needed and try_to_load_from_cache(model, name, revision=revision) is _CACHED_NO_EXIST:
        return None
    with _told(place):
        try:
            return Path(retried(lambda: hf_hub_download(model, name, revision=revision)))
        except RemoteEntryNotFoundError as error:
            if needed:
                raise ValueError(f"the hub's model has no {name}") from error
            return None
        except LocalEntryNotFoundError:
            if needed or not constants.is_offline_mode():
                raise
            return None


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Says of the client's errors what can be done."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{place.partition('@')[0]}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"the hub gives it only to who accepted its terms: do so at {page}, then `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"the hub's model has no revision {place.partition('@')[2] or 'main'}: see {page}") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no such folder, and no such model at {page} that this login may see (`hf auth login`, or HF_TOKEN)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
        raise ValueError(f"there is no such folder, it is not in {constants.HF_HUB_CACHE}, and {why}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise ValueError(f"the hub refuses it: {str(error).splitlines()[0]}") from error
