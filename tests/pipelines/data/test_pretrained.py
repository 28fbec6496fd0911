"""A run starts from a folder of safetensors, in one file or several; an error explains why a folder is refused."""

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raystride.model.classifier import Classifier
from raystride.model.hugging_face import to_hugging_face
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, SettingError, TokenizerConfig
from raystride.pipelines.config.parse import parse
from raystride.pipelines.data.pretrained import check_base, load_base_weights
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.data.tokenizers.chat import parse_tokenizer
from raystride.pipelines.system.hub import INDEX, WEIGHTS
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_encoder
from tests.errors import refused

SHAPE = ModelConfig(architecture="llama", layers=2, heads=2, hidden_size=8, context=4)


def _model(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(SHAPE, 300)


def _tokenizer(folder: Path, text: str) -> Folder:
    place = Folder(str(folder))
    assert train_tokenizer(TokenizerConfig(kind="bpe", vocabulary_size=300), [text], place, print).vocabulary_size == 300
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
    log_lines: list[str] = []
    model = _model(0)
    load_base_weights(model, f"{scheme}{source}", own, log_lines.append)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _model(1).parameters(), strict=True))
    assert [line.rpartition(" ")[2] for line in log_lines] == [f"{scheme}{source}"]


def test_ids_that_no_tokenizer_has_are_left_out(source: Path, own: Folder) -> None:
    torch.manual_seed(1)
    padded = Decoder(SHAPE, 320)
    description, tensors = to_hugging_face(padded, end_id=0)
    (source / INDEX).unlink()
    save_file(tensors, source / WEIGHTS)
    (source / "config.json").write_text(json.dumps(description))
    log_lines: list[str] = []
    model = _model(0)
    load_base_weights(model, str(source), own, log_lines.append)
    (line,) = log_lines
    assert str(source) in line
    assert " 20 ids " in line
    ids = torch.arange(4)[None]
    assert torch.equal(model.logits(model.hidden(ids)), padded.logits(padded.hidden(ids))[..., :300])
    # Without a tokenizer beside it, nothing says that the ids mean the same.
    (source / "tokenizer.json").unlink()
    with refused("model.init_from", str(source), names=["320 ids", "tokenizer 300"]):
        load_base_weights(_model(0), str(source), own, print)


def _is_memory_mapped(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in a memory-mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, *_, name = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in ends.split("-"))
        if start <= tensor.data_ptr() < stop:
            return name.endswith(".safetensors")
    return False


def test_frozen_weights_are_mapped_and_those_that_learn_are_not(source: Path, own: Folder) -> None:
    frozen = _model(0).requires_grad_(False)
    load_base_weights(frozen, str(source), own, print, share_frozen=True)
    assert all(torch.equal(a, b) for a, b in zip(frozen.parameters(), _model(1).parameters(), strict=True))
    mapped = {
        name.rpartition(".")[0].partition(".")[2][2:] for name, each in frozen.named_parameters() if _is_memory_mapped(each)
    }
    assert {"attention.out", "feed_forward.gate", "feed_forward.up", "feed_forward.down"} <= mapped
    assert "attention.qkv" not in mapped, "it is three tensors there"
    learns = _model(0)
    load_base_weights(learns, str(source), own, print, share_frozen=True)
    assert not any(map(_is_memory_mapped, learns.parameters()))
    before = (source / "model-00001-of-00002.safetensors").read_bytes()
    with torch.no_grad():
        frozen.embedding.weight.zero_()
    assert (source / "model-00001-of-00002.safetensors").read_bytes() == before


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _replace_by_pickle(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def _replace_by_folder(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").mkdir()


def _truncate_shard(folder: Path) -> None:
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
        (_replace_by_pickle, rf"neither {WEIGHTS} nor {INDEX}.*safetensors"),
        (_replace_by_folder, r"model-00001-of-00002\.safetensors is no file"),
        (_truncate_shard, r"model-00002-of-00002\.safetensors is truncated"),
        (_other_text, r"--tokenizer\.file .*/source/tokenizer\.json"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    source: Path, own: Folder, damage: Callable[[Path], None], message: str
) -> None:
    damage(source)
    with refused("model.init_from", str(source), names=[f"'{source}'"]) as raised:
        load_base_weights(_model(0), str(source), own, print)
    assert re.search(message, str(raised.value))
    with refused("model.init_from", str(source)) as in_driver:
        check_base(_config(source, own), str(source))
    assert str(in_driver.value) == str(raised.value)


def _config(source: Path, tokenizer: Folder) -> Config:
    """A training on a folder, by a tokenizer of its own."""
    file = TokenizerConfig(kind="file", file=str(tokenizer / "tokenizer.json"))
    return Config(model=replace(SHAPE, init_from=str(source)), tokenizer=file)


def test_a_driver_knows_a_base_from_headers_alone(source: Path, own: Folder) -> None:
    config = _config(source, own)
    base = check_base(config, str(source))
    assert (base.family, base.context, base.vocabulary_size) == ("llama", 4, 300)
    assert base.parameters == sum(parameter.numel() for parameter in _model(0).parameters())
    described = {
        "model.architecture": "llama",
        "model.hidden_size": 8,
        "model.heads": 2,
        "model.layers": 2,
        "model.context": 4,
    }
    assert base.settings.items() >= described.items()
    assert "tokenizer.file" not in base.settings, "the run has a file of its own"
    script = """
import pickle, sys
from raystride.pipelines.data.pretrained import check_base
config = pickle.loads(sys.stdin.buffer.read())
check_base(config, config.model.init_from)
print(sorted({"torch", "transformers", "ray", "safetensors"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(config), capture_output=True, check=True)
    assert done.stdout.split() == [b"[]"]


def _changed_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Writes the first file again with another header."""
    file = folder / "model-00001-of-00002.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])


def _quantise(header: dict[str, Any]) -> None:
    name = next(name for name in header if name.endswith("k_proj.weight"))
    header[name]["dtype"] = "I8"


def _widen(header: dict[str, Any]) -> None:
    name = next(name for name in header if name.endswith("k_proj.weight"))
    header[name]["shape"].append(1)


def _rename(header: dict[str, Any]) -> None:
    header["model.layers.9.mlp.up_proj.weight"] = header.pop(next(name for name in header if name.endswith("k_proj.weight")))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_quantise, ["k_proj.weight is I8", "dequantize()"]),
        (_widen, ["k_proj.weight is (8, 8, 1): the settings make it (8, 8)"]),
        (_rename, ["no tensor model.layers.", "k_proj.weight"]),
    ],
)
def test_headers_of_other_weights_are_named_in_the_driver(
    source: Path, own: Folder, change: Callable[[dict[str, Any]], None], names: list[str]
) -> None:
    _changed_header(source, change)
    with refused("model.init_from", str(source), names=names):
        check_base(_config(source, own), str(source))


def test_tokens_that_were_added_without_rows_are_named(source: Path, own: Folder) -> None:
    """Training by its own tokenizer is what was asked for, and no remedy."""
    tokenizer = parse_tokenizer((source / "tokenizer.json").read_text())
    tokenizer.add_special_tokens(["<new1>", "<new2>"])
    (source / "tokenizer.json").write_text(tokenizer.to_str())
    with refused("model.init_from", str(source), names=["2 ids more", "(<new1>, <new2>)", "resize_token_embeddings"]):
        check_base(_config(source, Folder(str(source))), str(source))


def test_a_base_in_a_store_is_known_from_headers_as_well(source: Path, own: Folder) -> None:
    assert check_base(_config(source, own), f"local://{source}") == check_base(_config(source, own), str(source))


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
        load_base_weights(_model(0), f"{scheme}{source}", own, print)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("index", [[], {}, {"weight_map": ["a.safetensors"]}])
def test_an_index_without_names_is_refused(source: Path, own: Folder, index: object) -> None:
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(SettingError, match=rf"^model\.init_from is '{source}': its {INDEX} has no weight_map$"):
        load_base_weights(_model(0), str(source), own, print)


def test_a_relative_folder_is_meant_from_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama").mkdir(parents=True)
    parsed = parse(ModelConfig, ["--init_from", "models/llama"], program="train.py")
    monkeypatch.chdir("/")
    assert parsed.settings.init_from == f"{tmp_path}/models/llama"


def _for_encoder(folder: Path, *flags: str) -> Config:
    return parse(Config, ["--task", "classification", "--model.init_from", str(folder), *flags], program="train.py").settings


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_an_encoder_is_checked_and_read(kind: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "base", kind, ["no", "yes"])
    config = _for_encoder(folder)
    base = check_base(config, str(folder))
    assert (base.family, base.context) == (kind, 24)
    own = Folder(str(tmp_path / "tokenizer"))
    train_tokenizer(config.tokenizer, [], own, lambda _: None)
    log_lines: list[str] = []
    model, other = (Classifier(config.model, base.vocabulary_size, 2) for _ in range(2))
    load_base_weights(model, str(folder), own, log_lines.append, labels=["no", "yes"])
    assert len(log_lines) == 1
    load_base_weights(other, str(folder), own, log_lines.append, labels=["up", "down"])
    assert log_lines[2].startswith("head of the classifier")
    assert torch.equal(model.blocks[1].attention.qkv.weight, other.blocks[1].attention.qkv.weight)  # type: ignore[union-attr]
    assert not torch.equal(model.head.weight, other.head.weight)


def test_a_base_must_be_a_network_for_its_task(tmp_path: Path, source: Path) -> None:
    encoder = write_encoder(tmp_path / "base", "bert")
    with refused("model.init_from", str(source), names=["classification", "llama"]):
        check_base(replace(_for_encoder(source), model=replace(SHAPE, init_from=str(source))), str(source))
    with refused("model.init_from", str(encoder), names=["decoder", "bert"]):
        check_base(Config(model=ModelConfig(init_from=str(encoder))), str(encoder))
    (encoder / "tokenizer.json").unlink()
    with refused("model.init_from", str(encoder), names=["tokenizer.json", "save_pretrained"]):
        check_base(_for_encoder(encoder), str(encoder))
