"""A run is served by OpenAI's protocol behind a token, and writes what `generate` writes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.model.generate import generate
from raystride.model.lora import merge_adapters
from raystride.pipelines.config import Config, LoraConfig, TokenizerConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.evaluate.load_run import LoadedModel, open_run
from raystride.pipelines.evaluate.serving import refuse_question
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.preferences import SHAPE, write_base
from tests.processes import make_job
from tests.ray_jobs.jobs import ROOT, environment, finish_job, start_script
from tests.tiny import tiny, write_text

PROMPT = "line 7: the"
TOKENS = 4


def _trained(storage: Path) -> Config:
    """A run that has ended: adapters on a base whose tokenizer writes chats."""
    base = write_base(storage, chat=True)
    config = tiny(
        write_text(storage),
        tokenizer=TokenizerConfig(kind="file", file=str(base / "tokenizer.json")),
        model=replace(SHAPE, init_from=str(base)),
        lora=LoraConfig(rank=2),
    )
    training = build_training(make_job(config, storage, "mine"), WorkerInfo(), [], lambda: False, lambda _: None)
    training.run()
    Folder(f"{storage}/mine").put("config.yaml", to_yaml(config))
    return config


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str, str]]:
    """The storage, the address, the token, and the client command; the server is stopped by SIGINT in the end."""
    storage = tmp_path_factory.mktemp("served")
    _trained(storage)
    flags = ("--run", "mine", "--storage", str(storage), "--checkpoint", "last", "--device", "cpu")
    (storage / "home").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ray_jobs" / "serve.py"), *flags],
        env=environment() | {"HOME": str(storage / "home"), "HF_HOME": str(storage / "home" / "none")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        address = next(found[1] for line in lines if (found := re.search(r"at (http://127\.0\.0\.1:\d+/v1), until", line)))
        command = next(line for line in lines if line.startswith("ask ")).removeprefix("ask ").strip()
        token = re.search(r"Bearer ([\w-]+)'", command)
        assert token is not None
        yield storage, address, token[1], command
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _greedy(opened: LoadedModel, ids: list[int]) -> str:
    found = generate(opened.decoder, [ids], tokens=TOKENS, temperature=0)
    return opened.encoder.decode([ids[0] for ids in found])


@pytest.mark.long
def test_a_client_gets_the_tokens_of_generate(served: tuple[Path, str, str, str]) -> None:
    openai = pytest.importorskip("openai")
    storage, address, token, _ = served
    opened = open_run(Folder(str(storage)), "mine", "last")
    merge_adapters(opened.model)
    client = openai.OpenAI(base_url=address, api_key=token)
    expected = _greedy(opened, opened.encoder.encode(PROMPT).tolist())
    answer = client.completions.create(model="mine", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert answer.choices[0].text == expected
    whole = client.completions.create(model="mine", prompt=PROMPT, temperature=0)
    assert whole.choices[0].text.startswith(expected)
    assert whole.usage.total_tokens <= opened.config.model.context
    messages = [{"role": "user", "content": "is it 46?"}]
    said = client.chat.completions.create(model="mine", messages=messages, max_tokens=TOKENS, temperature=0)
    chat: Any = opened.encoder
    assert said.choices[0].message.content == _greedy(opened, chat.chat.question("is it 46?").tolist())
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="mine", prompt="q" * 90)
    assert "has 90 tokens, and the model's context 48" in refused.value.response.text
    with pytest.raises(openai.AuthenticationError, match="send the token"):
        openai.OpenAI(base_url=address, api_key="another").models.list()


@pytest.mark.long
def test_a_client_finds_the_one_model_in_an_empty_home(served: tuple[Path, str, str, str]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served[1], api_key=served[2])
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("mine", "model", "raystride")
    assert client.models.retrieve("mine").id == "mine"
    with pytest.raises(openai.NotFoundError, match="this server has 'mine'"):
        client.models.retrieve("another")
    chunks = client.completions.create(model="mine", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].text]) > 0


@pytest.mark.long
def test_a_question_that_cannot_be_answered_as_asked_is_refused(served: tuple[Path, str, str, str]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=served[1], api_key=served[2])
    for asked, words in [
        ({"prompt": ""}, "prompt must be a text that is not empty"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"n": 2}, "n must be 1: ask again for another answer"),
        ({"logprobs": 3}, "logprobs is not supported: leave it out"),
    ]:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.completions.create(**{"model": "mine", "prompt": PROMPT, "max_tokens": TOKENS} | asked)
        assert refused.value.param == next(iter(asked))
    messages = [{"role": "user", "content": "is it 46?"}]
    answer = client.chat.completions.create(model="mine", messages=messages, max_completion_tokens=2, n=1, logprobs=False)
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("kind", "asked", "refused"),
    [
        ("prompt", {}, ""),
        ("prompt", {"max_tokens": None, "stop": ["a", "b"], "stream": True, "seed": 3, "n": 1, "echo": False}, ""),
        ("prompt", {"temperature": 2, "top_p": 1.0, "frequency_penalty": -0.5, "presence_penalty": 0, "user": "me"}, ""),
        ("prompt", {"prompt": ["a", "b"]}, "prompt"),
        ("prompt", {"prompt": None}, "prompt"),
        ("prompt", {"max_tokens": "five"}, "max_tokens"),
        ("prompt", {"max_tokens": -1}, "max_tokens"),
        ("prompt", {"max_tokens": True}, "max_tokens"),
        ("prompt", {"temperature": -1}, "temperature"),
        ("prompt", {"temperature": "hot"}, "temperature"),
        ("prompt", {"top_p": 0}, "top_p"),
        ("prompt", {"top_p": 2}, "top_p"),
        ("prompt", {"stop": [3]}, "stop"),
        ("prompt", {"stream": "yes"}, "stream"),
        ("prompt", {"presence_penalty": 1}, "presence_penalty"),
        ("prompt", {"echo": True}, "echo"),
        ("prompt", {"best_of": 2}, "best_of"),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, ""),
        ("messages", {"messages": []}, "messages"),
        ("messages", {}, "messages"),
        ("messages", {"messages": [{}], "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_the_engine_would_take_otherwise_is_named(kind: str, asked: dict[str, Any], refused: str) -> None:
    body = json.dumps({"model": "m"} | ({"prompt": "p"} if kind == "prompt" else {}) | asked).encode()
    found = refuse_question(kind, body, has_chat=True)
    assert (found[0] if found else "") == refused


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null"])
def test_a_body_that_is_no_object_is_named(body: bytes) -> None:
    assert refuse_question("prompt", body, has_chat=True) == ("body", "must be a JSON object")


def test_a_model_without_a_chat_template_answers_no_chats() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    found = refuse_question("messages", body, has_chat=False)
    assert found is not None
    assert "chat template" in found[1]


def test_a_token_that_was_given_is_not_printed() -> None:
    from raystride.jobs import serve

    opened: Any = SimpleNamespace(encoder=SimpleNamespace(chat=None))
    command = serve._curl_command("mine", "http://h/v1", serve._authorization_header("secret-token", is_new=False), opened)
    assert "secret-token" not in command
    echo = subprocess.run(
        ["bash", "-c", command.replace("curl -s", "echo")],
        env={"RAYSTRIDE_SERVE_TOKEN": "secret-token"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Authorization: Bearer secret-token" in echo.stdout
    assert "Bearer new-token" in serve._authorization_header("new-token", is_new=True)


@pytest.mark.long
def test_printed_commands_can_be_pasted(served: tuple[Path, str, str, str]) -> None:
    found = subprocess.run(["bash", "-c", served[3]], capture_output=True, text=True, check=True, timeout=120)
    assert '"choices"' in found.stdout


def test_a_run_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    outcome = finish_job(start_script("serve", "--run", "none", "--storage", str(tmp_path)))
    assert outcome.code == 2
    assert "there is no run" in outcome.err
