"""Models on a hub: the fetched files, the errors of a refused model, and the pushed files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import save

from raystride.model.hugging_face import hf_names, to_hugging_face
from raystride.model.lora import attach_adapters
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, SettingError, TokenizerConfig
from raystride.pipelines.config.jobs import ExportConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.data.pretrained import check_base, load_base_weights
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.launch.finished import push_run
from raystride.pipelines.system.hub import INDEX, WEIGHTS, fetch_model, is_hub_name, push, read_description
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.lora.peft import write_adapter
from tests.errors import refused
from tests.hub_server import HubServer, hub_server
from tests.some import some

SHAPE = ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=8, context=4)
NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with one model, whose client has a cache of its own and a login."""
    with hub_server() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which this server does not speak
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        server.add(NAME, _files())
        yield server


def _decoder(seed: int = 1) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(SHAPE, 257)


def _files() -> dict[str, bytes]:
    description, tensors = to_hugging_face(_decoder(), end_id=256)
    beside = {"README.md": b"# tiny", "pytorch_model.bin": b"pickled", "consolidated.safetensors": b"again"}
    return {"config.json": json.dumps(description).encode(), WEIGHTS: save(tensors), **beside}


def _start(place: str, tmp_path: Path) -> tuple[Decoder, list[str]]:
    error_text: list[str] = []
    model, own = _decoder(0), Folder(str(tmp_path / "own"))
    train_tokenizer(TokenizerConfig(kind="bytes"), [], own, error_text.append)
    load_base_weights(model, place, own, error_text.append)
    return model, error_text


def test_a_driver_knows_a_model_of_the_hub_without_fetching_its_weights(hub: HubServer) -> None:
    config = Config(model=replace(SHAPE, init_from=NAME), tokenizer=TokenizerConfig(kind="bytes"))
    base = check_base(config, NAME)
    assert (base.family, base.parameters) == ("llama", sum(each.numel() for each in _decoder().parameters()))
    assert not list(Path(constants.HF_HUB_CACHE).rglob(WEIGHTS))
    hub.add("org/pickled", {name: content for name, content in _files().items() if name != WEIGHTS})
    with refused("model.init_from", "org/pickled", names=[WEIGHTS, "pickled weights are not read"]):
        check_base(replace(config, model=replace(config.model, init_from="org/pickled")), "org/pickled")


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("org/name", True),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", True),
        ("org/name@main", True),
        ("/models/llama", False),
        ("s3://bucket/model", False),
        ("models/llama/base", False),
        ("models/tokenizer.json", False),
        ("./llama", False),
        ("llama", False),
    ],
)
def test_names_are_told_from_places(place: str, named: bool) -> None:
    assert is_hub_name(place) is named


def test_a_run_starts_with_a_model_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    model, error_text = _start(NAME, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _decoder().parameters(), strict=True))
    assert hub.models[NAME][0][0] in error_text[-1]  # which commit it was
    assert {each.split()[1] for each in hub.asked if each.startswith("GET")} == {"config.json", WEIGHTS}


def test_an_index_names_the_files_that_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    files = _files()
    weights = files.pop(WEIGHTS)
    index = {"weight_map": {"model.embed_tokens.weight": "part-1.safetensors"}}
    hub.add(NAME, files | {"part-1.safetensors": weights, "part-2.safetensors": b"", INDEX: json.dumps(index).encode()})
    assert {"config.json", INDEX, "part-1.safetensors"} == set(fetch_model(NAME).names())


def test_all_files_are_of_the_revision(hub: HubServer) -> None:
    first = hub.models[NAME][0][0]
    hub.add(NAME, {"config.json": b"{}", WEIGHTS: b"other"})
    assert fetch_model(f"{NAME}@{first}").read(WEIGHTS) == hub.models[NAME][0][1][WEIGHTS]
    assert fetch_model(NAME).read(WEIGHTS) == b"other"


def test_what_is_there_needs_no_network(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online, _ = _start(NAME, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    offline, _ = _start(NAME, tmp_path)
    assert len(hub.asked) == asked
    assert all(torch.equal(a, b) for a, b in zip(online.parameters(), offline.parameters(), strict=True))
    with refused("model.init_from", "org/other", names=["HF_HUB_OFFLINE"]):
        _start("org/other", tmp_path)


def test_what_is_there_needs_no_hub_that_can_be_reached(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online, _ = _start(NAME, tmp_path)
    nowhere = "http://127.0.0.1:1"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    away, _ = _start(NAME, tmp_path)
    assert all(torch.equal(a, b) for a, b in some(zip(online.parameters(), away.parameters(), strict=True)))


def test_a_busy_hub_is_asked_again(hub: HubServer, tmp_path: Path) -> None:
    hub.busy = 1
    assert _start(NAME, tmp_path)


def test_a_shape_that_does_not_fit_is_named_before_a_weight_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    files = _files()
    changed = json.loads(files["config.json"]) | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    hub.add(NAME, files | {"config.json": json.dumps(changed).encode()})
    with refused("model.init_from", "org/tiny", names=["rope_type is 'yarn'"]):
        _start(NAME, tmp_path)
    assert {each.split()[1] for each in hub.asked} == {"config.json"}


@pytest.mark.parametrize(
    ("place", "error_text"),
    [
        ("org/none", "no such model .*/org/none "),
        (f"{NAME}@v9", "no revision v9"),
        ("org/gated", "terms.*/org/gated, then `hf auth login`"),
        ("org/empty", "no config.json"),
    ],
)
def test_what_the_hub_does_not_give_is_said(hub: HubServer, place: str, error_text: str) -> None:
    hub.add("org/gated", _files())
    hub.add("org/empty", {})
    hub.gated.add("org/gated")
    with pytest.raises(ValueError, match=error_text):
        read_description(place)


def test_a_tokenizer_comes_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    bpe = Folder(str(tmp_path / "bpe"))
    train_tokenizer(TokenizerConfig(kind="bpe", vocabulary_size=300), ["some text and more text " * 9], bpe, print)
    tokens = json.dumps({"eos_token": "<|end|>"}).encode()
    chat = b"{% for m in messages %}{{ m.content }}{% endfor %}"
    files = {"tokenizer.json": bpe.read("tokenizer.json"), "tokenizer_config.json": tokens, "chat_template.jinja": chat}
    hub.add(NAME, _files() | files)
    own = Folder(str(tmp_path / "own"))
    encoder: Any = train_tokenizer(TokenizerConfig(kind="file", file=NAME), ["some text"], own, print)
    assert encoder.encode("more text").tolist()
    assert encoder.chat is not None


def test_a_folder_is_pushed_with_the_card_of_its_run(hub: HubServer, tmp_path: Path) -> None:
    """Other files of the folder stay where they are."""
    exported, storage = Folder(str(tmp_path / "exported")), Folder(str(tmp_path / "runs"))
    for name, content in _files().items():
        exported.put(name, content)
    run = storage / "mine"
    run.put("config.yaml", to_yaml(Config(model=ModelConfig(init_from="org/base@main"))))
    run.put_json("summary.json", {"val_loss": 1.25, "steps": 70, "metrics": {"val_accuracy": 0.5}})
    settings = ExportConfig(run="mine", storage=str(storage), push="me/mine")
    assert push_run(settings, exported, 60) == f"{hub.address}/me/mine"
    files = hub.files("me/mine")
    card = files.pop("README.md").decode()
    assert files == {name: content for name, content in _files().items() if name in ("config.json", WEIGHTS)}
    assert hub.large  # weights went by LFS
    assert all(
        each in card for each in ("base_model: org/base", "| validation loss | 1.2500 |", "val_accuracy", "# license:")
    )
    assert "after 60 steps" in card
    data = ModelCard(card).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("org/base", "transformers", "text-generation")
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("accuracy", 0.5, "validation")
    assert "`org/base@main`" in card
    hub.private.add("me/others")
    with refused("push", "me/others", names=["--push me/others: "]):
        push_run(ExportConfig(run="mine", storage=str(storage), push="me/others"), exported, 60)
    # What is pushed is fetched again.
    assert fetch_model("me/mine").read(WEIGHTS) == files[WEIGHTS]
    assert push(exported, ["config.json"], "me/mine", "# again") == f"{hub.address}/me/mine"
    assert hub.files("me/mine")["README.md"] == b"# again"


@pytest.mark.parametrize(("name", "to"), [("mine", "hugging_face"), ("me/mine@v1", "hugging_face"), ("me/mine", "mlflow")])
def test_a_name_that_cannot_be_pushed_to_is_refused(name: str, to: Any) -> None:
    with pytest.raises(SettingError, match=r"push is "):
        ExportConfig(run="mine", push=name, to=to)


@pytest.mark.parametrize(
    ("base", "pushed_description", "card_says"),
    [
        ("org/base@v1", ("org/base", "v1"), ['from_pretrained("org/base", revision="v1")', "base_model: org/base"]),
        ("/models/base", (None, None), ['from_pretrained("FOLDER")', "is not on the hub"]),
    ],
)
def test_an_adapter_is_pushed_with_how_it_comes_to_its_base(
    hub: HubServer, tmp_path: Path, base: str, pushed_description: tuple[Any, Any], card_says: list[str]
) -> None:
    lora, model = LoraConfig(rank=2), _decoder()
    attach_adapters(model, lora, hf_names(model))
    exported = write_adapter(model, lora, Folder(str(tmp_path / "exported")), base)
    exported.put("config.json", "{}")  # of an earlier export into the same folder
    run = Folder(str(tmp_path / "runs")) / "mine"
    run.put("config.yaml", to_yaml(Config(model=ModelConfig(init_from=base), lora=lora)))
    push_run(ExportConfig(run="mine", storage=str(tmp_path / "runs"), push="me/adapter"), exported, 60)
    files = hub.files("me/adapter")
    assert files.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    described = json.loads(files["adapter_config.json"])
    assert (described["base_model_name_or_path"], described["revision"]) == pushed_description
    card = files["README.md"].decode()
    assert all(each in card for each in ("library_name: peft", 'PeftModel.from_pretrained(base, "me/adapter")', *card_says))
    assert ModelCard(card).data.model_name is None
