"""A run starts from a folder of safetensors, in one file or several, and says what is wrong with one that it cannot take."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raystride.model.hugging_face import to_hugging_face
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Model, SettingError, Tokenizer
from raystride.pipelines.config.parse import parse
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import INDEX, WEIGHTS
from raystride.pipelines.pretrained import start_from
from raystride.pipelines.tokenizers import train_tokenizer
from tests.errors import refused

SHAPE = Model(flavour="llama", layers=2, heads=2, width=8, context=4)


def _model(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(SHAPE, 300)


def _tokenizer(folder: Path, text: str) -> Folder:
    place = Folder(str(folder))
    assert train_tokenizer(Tokenizer(kind="bpe", vocabulary_size=300), [text], place, print).vocabulary_size == 300
    return place


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """The tokenizer of the run."""
    return _tokenizer(tmp_path / "own", "the quick brown foxes jump over the lazy dogs, and one square of it returns " * 9)


@pytest.fixture
def source(tmp_path: Path, own: Folder) -> Path:
    """A folder with a model in two files, and the run's tokenizer."""
    folder = tmp_path / "source"
    folder.mkdir()
    description, tensors = to_hugging_face(_model(1), end_id=0)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(description))
    (folder / "tokenizer.json").write_bytes(own.read("tokenizer.json"))
    return folder


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_two_files_and_an_index_are_one_model(source: Path, own: Folder, scheme: str) -> None:
    said: list[str] = []
    model = _model(0)
    start_from(model, f"{scheme}{source}", own, said.append)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _model(1).parameters(), strict=True))
    assert [line.rpartition(" ")[2] for line in said] == [f"{scheme}{source}"]


def test_ids_that_no_tokenizer_has_are_left_out(source: Path, own: Folder) -> None:
    torch.manual_seed(1)
    padded = Decoder(SHAPE, 320)
    description, tensors = to_hugging_face(padded, end_id=0)
    (source / INDEX).unlink()
    save_file(tensors, source / WEIGHTS)
    (source / "config.json").write_text(json.dumps(description))
    said: list[str] = []
    model = _model(0)
    start_from(model, str(source), own, said.append)
    (line,) = said
    assert str(source) in line
    assert " 20 ids " in line
    ids = torch.arange(4)[None]
    assert torch.equal(model.logits(model.hidden(ids)), padded.logits(padded.hidden(ids))[..., :300])
    # Without a tokenizer beside it, nothing says that the ids mean the same.
    (source / "tokenizer.json").unlink()
    with refused("model.init_from", str(source), names=["320 ids", "tokenizer 300"]):
        start_from(_model(0), str(source), own, print)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _pickled(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def _truncated(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _other_text(folder: Path) -> None:
    other = _tokenizer(folder / "other", "quite another text with quite another habit of its letters, café 平方 " * 9)
    (folder / "tokenizer.json").write_bytes(other.read("tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("config.json"), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"Expecting property name"),
        (_without("model-00002-of-00002.safetensors"), rf"no model-00002-of-00002\.safetensors.*{INDEX}"),
        (_pickled, rf"neither {WEIGHTS} nor {INDEX}.*safetensors"),
        (_truncated, r"[Ii]ncomplete|buffer"),
        (_other_text, r"--tokenizer\.file .*/source/tokenizer\.json"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    source: Path, own: Folder, damage: Callable[[Path], None], message: str
) -> None:
    damage(source)
    with refused("model.init_from", str(source), names=[f"'{source}'"]) as raised:
        start_from(_model(0), str(source), own, print)
    assert re.search(message, str(raised.value))


@pytest.mark.parametrize("scheme", ["", "local://"])
@pytest.mark.parametrize(
    "file", ["../../authorized_keys", "{outside}/authorized_keys", "a\\b", "nested/a", "..", "", 7], ids=repr
)
def test_an_index_names_files_beside_it_alone(
    source: Path, own: Folder, scheme: str, file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another name the index of a stranger's bucket would have its bytes written wherever it says."""
    outside = source.parent / "outside"
    (scratch := outside / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    file = file.format(outside=outside) if isinstance(file, str) else file
    (source.parent.parent / "authorized_keys").write_text("theirs")
    before = sorted(outside.rglob("*"))
    (source / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with refused("model.init_from", f"{scheme}{source}", names=[f"{INDEX} names {file!r},"]):
        start_from(_model(0), f"{scheme}{source}", own, print)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("index", [[], {}, {"weight_map": ["a.safetensors"]}])
def test_an_index_without_names_is_refused(source: Path, own: Folder, index: object) -> None:
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(SettingError, match=rf"^model\.init_from is '{source}': its {INDEX} has no weight_map$"):
        start_from(_model(0), str(source), own, print)


def test_a_relative_folder_is_meant_from_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama").mkdir(parents=True)
    parsed = parse(Model, ["--init_from", "models/llama"], program="train.py")
    monkeypatch.chdir("/")
    assert parsed.settings.init_from == f"{tmp_path}/models/llama"
