"""Trainings whose addresses hold passwords and keys: none of these stands in any file that is left behind, or is printed."""

import http.server
import json
import os
import re
import shutil
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import pytest

from raystride.pipelines.config import (
    Config,
    DataConfig,
    LaunchConfig,
    RecordConfig,
    SampleConfig,
    ScalingConfig,
    TokenizerConfig,
    TrainConfig,
)
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.observability.record.mlflow.ui import await_server, start_server, stop_server
from raystride.pipelines.system.storage.folder import Folder
from tests.ports import hold_port
from tests.ray_jobs.jobs import ROOT, Outcome, finish_job, start_script
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(900)
PASSWORD, SIGNATURE, KEY = "hunter2-of-the-tracking-server", "5fQ-signature-of-the-data", "wJalr-key-of-the-tokenizer"


class _Asks(http.server.BaseHTTPRequestHandler):
    """Gives out files, and ranges of them, to whoever has the password, or the signature."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        """Answers."""
        login = "Basic " + b64encode(f"me:{KEY}".encode()).decode()
        content = self.files.get(self.path.partition("?")[0])
        if content is None or (f"sig={SIGNATURE}" not in self.path and self.headers.get("Authorization") != login):
            self.send_error(404 if content is None else 401)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2] or len(content) - 1)) if asked else (0, len(content) - 1)
        part = content[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a web server with a text and a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    text = write_text(folder)
    place = Folder(str(folder / "made"))
    train_tokenizer(TokenizerConfig(kind="bpe", vocabulary_size=300), [text.read_text()], place, print)
    _Asks.files = {"/text.txt": text.read_bytes(), "/tokenizer.json": place.read("tokenizer.json")}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Asks)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Host and port of MLflow's server, and the folder of its database and artifacts."""
    folder = tmp_path_factory.mktemp("tracking")
    with hold_port() as port:
        server = start_server(f"sqlite:///{folder}/mlflow.db", port)
        assert await_server(server, port, threading.Event())
        yield f"127.0.0.1:{port}", folder
        stop_server(server)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for Ray's own files, whose sockets have names that must be short."""
    (folder := Path("/tmp") / f"rs-{os.getpid()}-{time.monotonic_ns() % 10**6}").mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def config(tmp_path: Path, data: str, tracking: tuple[str, Path]) -> Config:
    """Settings with a secret wherever an address may hold one."""
    return tiny(
        tmp_path,
        storage=str(tmp_path / "runs"),
        data=DataConfig(source=f"http://{data}/text.txt?sig={SIGNATURE}", kind="text", validation="tail"),
        tokenizer=TokenizerConfig(kind="file", file=f"http://me:{KEY}@{data}/tokenizer.json"),
        train=TrainConfig(steps=4, slots=4, slot_size=2, log_every=2),
        record=RecordConfig(mlflow_uri=f"http://me:{PASSWORD}@{tracking[0]}", tensorboard=True),
        sample=SampleConfig(tokens=5),
        launch=LaunchConfig(mode="inline"),
    )


def _flags(config: Config) -> list[str]:
    """The settings as a user would give them, secrets by flags: a file that is kept is not where they belong."""
    file = Path(config.storage).parent / "given.yaml"
    file.write_text(to_yaml(config))
    secrets = {"data.source": config.data.source, "tokenizer.file": config.tokenizer.file}
    secrets["record.mlflow_uri"] = config.record.mlflow_uri
    return ["--config", str(file), *(part for key, value in secrets.items() for part in (f"--{key}", str(value)))]


def _job(job: str, *flags: str, env: dict[str, str] | None = None) -> Outcome:
    return finish_job(start_script(job, *flags, env=env))


def _leaks(*places: Path) -> list[str]:
    """Files in which a secret stands, written as it is or as addresses and headers have it."""
    words = [form for each in (PASSWORD, SIGNATURE, KEY) for form in (each, quote(each), b64encode(each.encode()).decode())]
    found = []
    for path in (path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()):
        content = path.read_bytes()
        found += [f"{path}: {word}" for word in words if word.encode() in content]
    return found


def _said_nothing(outcome: Outcome) -> None:
    assert not [secret for secret in (PASSWORD, SIGNATURE, KEY) if secret in outcome.out + outcome.err]


@pytest.mark.long
def test_an_inline_run_and_what_is_made_of_it_hold_no_secret(
    config: Config, tmp_path: Path, tracking: tuple[str, Path]
) -> None:
    flags = [*_flags(config), "--run", "told"]
    outcome = _job("train", *flags)
    assert outcome.code == 0, outcome.err[-3000:]
    _said_nothing(outcome)
    run = tmp_path / "runs" / "told"
    reference = json.loads((run / "mlflow.json").read_text())
    assert reference["uri"] == f"http://{tracking[0]}"
    assert json.loads((run / "environment.json").read_text())["command"][-3] == f"http://***@{tracking[0]}"
    assert list((run / "tensorboard").rglob("*tfevents*"))
    storage = ["--storage", config.storage, "--run", "told"]
    exported = _job("export", *storage, "--to", "mlflow", env={"MLFLOW_TRACKING_URI": str(config.record.mlflow_uri)})
    assert exported.code == 0, exported.err[-3000:]
    _said_nothing(exported)
    assert (run / "export" / "mlflow" / "artifacts" / "run" / "config.yaml").exists()
    assert not _leaks(tmp_path, tracking[1])

    # Longer, with the secrets again: of the same name, and as the same settings.
    again = _job("train", *flags, "--train.steps", "6")
    assert again.code == 0, again.err[-3000:]
    assert json.loads((run / "mlflow.json").read_text())["run_id"] == reference["run_id"]
    # And from what the run itself has kept, which says what it lacks.
    kept = ["--config", str(run / "config.yaml"), "--train.steps", "8"]
    lacking = _job("train", *kept)
    assert lacking.code == 2
    assert f"data.source is 'http://{config.data.source.split('/')[2]}/text.txt?sig=***'" in lacking.err
    given = " ".join(map(str, (config.data.source, config.tokenizer.file)))
    env = {"RAYSTRIDE_URIS": given, "MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": PASSWORD}
    resumed = _job("train", *kept, env=env)
    assert resumed.code == 0, resumed.err[-3000:]
    assert json.loads((run / "summary.json").read_text())["steps"] == 8
    assert json.loads((run / "mlflow.json").read_text())["run_id"] == reference["run_id"]
    for each in (again, lacking, resumed):
        _said_nothing(each)
    assert not _leaks(tmp_path, tracking[1])


@pytest.mark.weekly
@pytest.mark.long
def test_a_run_that_fails_says_none(config: Config, tmp_path: Path, tracking: tuple[str, Path]) -> None:
    away = replace(config, record=replace(config.record, mlflow_uri=f"http://me:{PASSWORD}@127.0.0.1:9"))
    warned = _job("train", *_flags(away), "--run", "away")
    assert warned.code == 0, warned.err[-3000:]
    assert "MLflow at http://127.0.0.1:9" in warned.err
    wrong = replace(config, data=replace(config.data, source=f"http://me:{PASSWORD}@127.0.0.1:9/a.txt?sig={SIGNATURE}"))
    refused = _job("train", *_flags(wrong), "--run", "wrong")
    assert refused.code != 0
    for each in (warned, refused):
        _said_nothing(each)
    assert not _leaks(tmp_path)


@pytest.mark.weekly  # a sweep, below, has a run on Ray and its logs as well
def test_a_run_on_ray_and_rays_own_logs_hold_no_secret(
    config: Config, tmp_path: Path, tracking: tuple[str, Path], temporary: Path
) -> None:
    spread = replace(config, launch=LaunchConfig(), scaling=ScalingConfig(workers=2))
    env = {"RAY_TMPDIR": str(temporary), "HOME": str(tmp_path / "home")}
    outcome = _job("train", *_flags(spread), "--run", "spread", env=env)
    assert outcome.code == 0, outcome.err[-3000:]
    _said_nothing(outcome)
    assert list(temporary.rglob("raylet.out")), "Ray's logs are there to be searched"
    assert not _leaks(tmp_path, tracking[1], temporary)


@pytest.mark.long
@pytest.mark.weekly
def test_a_sweep_and_what_tune_keeps_of_it_hold_no_secret(
    config: Config, tmp_path: Path, tracking: tuple[str, Path], temporary: Path
) -> None:
    sweep = SweepConfig(space={"scaling.workers": [1]}, warmup_steps=2, window_steps=2, windows=3)
    settings = SweepJobConfig(**vars(replace(config, launch=LaunchConfig())), sweep=sweep)
    env = {"RAY_TMPDIR": str(temporary), "HOME": str(tmp_path / "home")}
    outcome = _job("sweep", *_flags(settings), "--run", "swept", env=env)
    assert outcome.code == 0, outcome.err[-3000:]
    _said_nothing(outcome)
    assert list((tmp_path / "runs" / "swept" / ".ray").rglob("*.pkl")), "Tune's pickles are there to be searched"
    assert not _leaks(tmp_path, tracking[1], temporary)


@pytest.mark.parametrize(
    "name",
    [
        ".env", "prod.env", ".env.local", "deploy/key.pem", "server.key", "id_rsa", "id_ed25519.pub", ".netrc", ".pgpass",
        ".aws/credentials", ".ssh/config", ".kube/config", ".git-credentials", ".ray/auth_token", "service-account-x.json",
    ],
)  # fmt: skip
def test_a_submitted_job_takes_no_keys_along(name: str, tmp_path: Path) -> None:
    """The file has the form of .gitignore, by which Ray reads it."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copy(ROOT / ".rayignore", tmp_path / ".gitignore")
    asked = ["git", "-C", str(tmp_path), "check-ignore", "-q", "--no-index"]
    assert subprocess.run([*asked, name], check=False).returncode == 0
    ours = (
        "ray_jobs/train.py",
        "raystride/pipelines/system/credentials.py",
        "raystride/model/block.py",
        "configs/lm_python.yaml",
    )
    for each in ours:
        assert subprocess.run([*asked, each], check=False).returncode == 1
