"""MLflow with users: its server asks for passwords, keeps what it knows in PostgreSQL, and all of that behind TLS.

The database is the distribution's, with passwords (SCRAM) and certificates, and so is what the server asks of its users. A
training's record gets there once, whatever was in its way, by the recorder alone.
"""

import base64
import json
import os
import pwd
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    RecordConfig,
    SampleConfig,
    ScalingConfig,
    TrainConfig,
)
from raystride.pipelines.launch.cluster.certificates import make_certificates
from raystride.pipelines.observability.record.mlflow.ui import stop_server
from tests.children import find_children
from tests.ports import hold_port
from tests.ray_jobs.jobs import finish_job, run_job, start_job, summary, wait_for_checkpoint
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
USER = "trainer"


def _unable() -> str:
    """Why there can be no such server here; empty where there can."""
    if PROGRAMS is None:
        return "PostgreSQL is not installed (apt-get install postgresql)"
    try:
        import flask_wtf  # noqa: F401
        import psycopg2  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed (pip install 'raystride[server]')"
    if os.geteuid() == 0 and not any(each.pw_name == "postgres" for each in pwd.getpwall()):
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.skipif(bool(_unable()), reason=_unable())]


@dataclass(frozen=True)
class Server:
    """A tracking server with users, and its database."""

    address: str
    database: str
    authority: Path
    passwords: dict[str, str]
    folder: Path

    def login(self, password: str | None = None) -> dict[str, str]:
        """What the training's user has in the environment."""
        return {
            "MLFLOW_TRACKING_USERNAME": USER,
            "MLFLOW_TRACKING_PASSWORD": password or self.passwords[USER],
            "MLFLOW_TRACKING_SERVER_CERT_PATH": str(self.authority),
        }

    def login_by_file(self, home: Path) -> dict[str, str]:
        """The same where the password is in MLflow's own file."""
        (file := home / ".mlflow" / "credentials").parent.mkdir(parents=True)
        lines = ("[mlflow]", f"mlflow_tracking_username = {USER}", f"mlflow_tracking_password = {self.passwords[USER]}")
        file.write_text("\n".join(lines))
        return {"HOME": str(home), "MLFLOW_TRACKING_SERVER_CERT_PATH": str(self.authority)}

    def ask(self, path: str, told: dict[str, Any] | None = None, user: str = "admin") -> Any:
        """What the server answers to a user; raises HTTPError where it refuses."""
        login = base64.b64encode(f"{user}:{self.passwords[user]}".encode()).decode() if user else ""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Basic {login}"} if user else {})
        asked = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/{path}", headers=headers, data=json.dumps(told).encode() if told else None
        )
        context = ssl.create_default_context(cafile=str(self.authority))
        with urllib.request.urlopen(asked, timeout=30, context=context) as answer:
            return json.load(answer)

    def points(self, run: str) -> list[tuple[str, int, int]]:
        """Each measurement that the database has of a run, as name, step and time; straight from its table."""
        import psycopg2

        with psycopg2.connect(self.database) as connection, connection.cursor() as cursor:
            asked = "SELECT m.key, m.step, m.timestamp FROM metrics m JOIN runs r USING (run_uuid) WHERE r.name = %s"
            cursor.execute(asked, (run,))
            return list(cursor.fetchall())


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Of PostgreSQL and of MLflow's server."""
    with hold_port() as first, hold_port() as second:
        yield first, second


@pytest.fixture(scope="module")
def database(ports: tuple[int, int]) -> Iterator[tuple[str, Path]]:
    """The address of a PostgreSQL, behind TLS on loopback, and the folder with its certificates."""
    assert PROGRAMS
    folder, user = Path(tempfile.mkdtemp(prefix="rs-postgres-")), "postgres" if os.geteuid() == 0 else None
    port, password = ports[0], secrets.token_hex(16)
    (tls,) = make_certificates(folder / "tls", ["127.0.0.1"], str(folder), 2)
    (folder / "password").write_text(password)
    if user:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user)
    as_user: dict[str, Any] = {"user": user, "group": user} if user else {}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    made = ["--username=mlflow", f"--pwfile={folder}/password", "--auth=scram-sha-256", "-E", "UTF8", "--no-sync"]
    subprocess.run([PROGRAMS / "initdb", "-D", folder / "db", *made], check=True, **as_user, **quiet)
    (folder / "db" / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
    settings = {
        "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": folder, "fsync": "off", "ssl": "on",
        "ssl_cert_file": tls / "host.pem", "ssl_key_file": tls / "host.key", "ssl_ca_file": tls / "ca.pem",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    server = subprocess.Popen([PROGRAMS / "postgres", "-D", folder / "db", *options], **as_user, **quiet)
    address = f"postgresql://mlflow:{password}@127.0.0.1:{port}/postgres?sslmode=verify-full&sslrootcert={tls}/ca.pem"
    try:
        wait_until(lambda: _speaks(address), "an answer of PostgreSQL", server, pause_s=0.25)
        yield address, tls
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder)


def _speaks(address: str) -> bool:
    import psycopg2

    with suppress(psycopg2.OperationalError):
        psycopg2.connect(address).close()
        return True
    return False


@pytest.fixture(scope="module")
def server(database: tuple[str, Path], ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """MLflow's server as docs/security.md has it started, with a user who trains."""
    folder, (address, tls), port = tmp_path_factory.mktemp("server"), database, ports[1]
    database_uri = address.replace("postgresql:", "postgresql+psycopg2:")
    passwords = {name: secrets.token_hex(16) for name in ("admin", USER)}
    (folder / "users.ini").write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\nadmin_username = admin\ndatabase_uri = {database_uri}\n"
    )
    variables = {
        "MLFLOW_BACKEND_STORE_URI": database_uri,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "users.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": passwords["admin"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--host", "127.0.0.1", "--workers", "1"]
    shown = f"--ssl-certfile={tls}/host.pem --ssl-keyfile={tls}/host.key"
    command += ["--port", str(port), "--artifacts-destination", str(folder / "files"), "--uvicorn-opts", shown]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
    found = Server(f"https://127.0.0.1:{port}", address, tls / "ca.pem", passwords, folder)
    try:
        wait_until(lambda: _answers(found), "an answer of MLflow", process, pause_s=0.25)
        found.ask("users/create", {"username": USER, "password": passwords[USER]})
        yield found
    finally:
        stop_server(process)


def _answers(server: Server) -> bool:
    with suppress(urllib.error.URLError, OSError):
        server.ask("experiments/get?experiment_id=0")
        return True
    return False


@pytest.fixture
def config(tmp_path: Path, server: Server) -> Config:
    """Tiny settings that write to the server."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        train=TrainConfig(steps=30, slots=4, slot_size=2, log_every=5),
        record=RecordConfig(mlflow_uri=server.address, experiment="users"),
        sample=SampleConfig(tokens=0),
        launch=LaunchConfig(mode="inline"),
    )


def _replay(config: Config, run: str, login: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "raystride", "runs", "replay", run, "--storage", config.storage]
    patient = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "120"}  # ours is 10 s, which a machine with much else to do exceeds
    done = subprocess.run(command, env=os.environ | patient | login, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def _holding(word: str, *places: Path) -> list[Path]:
    files = (path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if word.encode() in path.read_bytes()]


@pytest.mark.weekly
def test_who_has_no_password_gets_nothing(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.ask("experiments/search?max_results=5", user="")
    with pytest.raises(urllib.error.HTTPError, match="403"):  # another user's, as this server's default has it
        server.ask("experiments/get?experiment_id=0", user=USER)


@pytest.mark.weekly
def test_a_wrong_password_is_named_costs_nothing_and_is_made_good_once(
    config: Config, server: Server, tmp_path: Path
) -> None:
    wrong = secrets.token_hex(16)
    outcome = run_job("train", config, "--run", "refused", env=server.login(wrong))
    assert outcome.code == 0, outcome.err[-3000:]
    assert summary(config, "refused")["steps"] == 30
    assert f"MLflow at {server.address} " in outcome.err
    assert "401" in outcome.err
    assert "MLFLOW_TRACKING_PASSWORD" in outcome.err
    assert not server.points("refused")
    code, said = _replay(config, "refused", server.login(wrong))
    assert code != 0
    assert "401" in said
    for login in (server.login(), server.login_by_file(tmp_path / "home")):
        code, said = _replay(config, "refused", login)
        assert code == 0, said
        points = server.points("refused")
        assert len([each for each in points if each[0] == "train/loss"]) == 6
        assert len(points) == len(set(points))
    assert list(server.folder.glob("files/**/config.yaml"))
    shutil.rmtree(tmp_path / "home")
    for word in (wrong, server.passwords[USER]):
        assert word not in outcome.out + outcome.err + said
        assert not _holding(word, tmp_path, server.folder)


@pytest.mark.weekly
def test_a_training_on_ray_writes_once_and_its_workers_hold_no_login(
    config: Config, server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (temporary := Path("/tmp") / f"rs-{os.getpid()}-users").mkdir()  # Ray's sockets have names that must be short
    request.addfinalizer(lambda: shutil.rmtree(temporary, ignore_errors=True))
    steps = TrainConfig(steps=400, slots=4, slot_size=2, log_every=20)
    spread = replace(
        config, launch=LaunchConfig(), scaling=ScalingConfig(workers=2), train=steps, checkpoint=CheckpointConfig(every=20)
    )
    env = server.login() | {"RAY_TMPDIR": str(temporary), "HOME": str(tmp_path / "home")}
    job = start_job("train", spread, "--run", "spread", env=env)
    wait_for_checkpoint(spread, "spread", 20, job)
    processes = find_children(job.pid, ".", recursive=True)
    workers = find_children(job.pid, "RayTrainWorker", recursive=True)
    holders = [process for process in processes if server.passwords[USER].encode() in _environment(process)]
    strangers = [process for process in holders if not _below_the_recorder(process)]
    outcome = finish_job(job)
    assert outcome.code == 0, outcome.err[-3000:]
    assert len(workers) == 2, processes
    assert holders, "MLflow's client has a process of its own, whose environment has the login"
    assert not strangers
    points = server.points("spread")
    assert len([each for each in points if each[0] == "train/loss"]) == 20
    assert len(points) == len(set(points))
    code, said = _replay(spread, "spread", server.login())
    assert code == 0, said
    assert sorted(server.points("spread")) == sorted(points)
    assert not _holding(server.passwords[USER], tmp_path, temporary, server.folder)
    assert server.passwords[USER] not in outcome.out + outcome.err


def _environment(process: psutil.Process) -> bytes:
    """What a process began with."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    return b""


def _below_the_recorder(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("RecorderActor" in " ".join(each.cmdline()) for each in process.parents())
    return True  # it has ended
