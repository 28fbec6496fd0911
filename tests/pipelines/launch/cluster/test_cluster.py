"""Ray's token is its user's alone, whoever made it, and a cluster that asks for none is spoken of."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster import cluster as cluster_module
from raystride.pipelines.launch.cluster.cluster import (
    NoCluster,
    _short_session_folder,
    cluster,
    keep_token_private,
    start_local_ray,
    token_file,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a token, of a user who has said nothing of it, and whose files all may read."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_before_ray_makes_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_token_private()
    file = home / ".ray" / "auth_token"
    assert file == token_file()
    assert (_mode(file), _mode(file.parent)) == (0o600, 0o700)
    assert len(file.read_text()) == 64
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]
    first = file.read_text()
    keep_token_private()
    assert file.read_text() == first
    assert capsys.readouterr() == ("", "")


def test_one_that_all_could_read_is_closed_and_stays(home: Path) -> None:
    (home / ".ray").mkdir()
    file = home / ".ray" / "auth_token"
    file.write_text("theirs")
    assert _mode(file) == 0o644
    keep_token_private()
    assert (file.read_text(), _mode(file)) == ("theirs", 0o600)


def test_jobs_that_start_at_once_have_one_token(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: keep_token_private(), range(8)))
    assert len(token_file().read_text()) == 64
    assert len(list((home / ".ray").iterdir())) == 1


def test_another_place_or_another_token_is_the_user_s(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "mine" / "token"))
    keep_token_private()
    assert _mode(home / "mine" / "token") == 0o600
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "other"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    keep_token_private()
    assert not (home / "other").exists()


def test_a_cluster_that_asks_for_none_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    keep_token_private()
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "warning: RAY_AUTH_MODE is disabled: whoever reaches Ray's ports on this machine can run code as you"
    assert not (home / ".ray").exists()


def test_a_start_that_was_too_slow_is_made_again_and_another_failure_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    failures = [
        Exception("The current node timed out during startup."),
        Exception("The current node timed out during startup."),
    ]
    tried: list[dict[str, object]] = []
    left: list[subprocess.Popen[bytes]] = []

    def init(**options: object) -> str:
        tried.append(options)
        if failures:
            for argument in ("/site-packages/ray/gcs_server", "a user's"):
                left.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", argument]))
            raise failures.pop()
        return "there"

    monkeypatch.setattr(ray, "init", init)
    assert start_local_ray(num_cpus=1) == "there"
    assert len(tried) == 3
    assert [process.poll() is None for process in left] == [False, True] * 2, "a failed start's processes are ended"
    failures += [ValueError("no such option")]
    with pytest.raises(ValueError, match="no such option"):
        start_local_ray()
    failures += [Exception("timed out during startup")] * 3
    with pytest.raises(Exception, match="timed out during startup"):
        start_local_ray()
    for process in left:
        process.kill()
        process.wait()


def test_the_address_of_a_dashboard_is_refused_at_once_by_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoCluster, match=r"launch\.address is 'http://127\.0\.0\.1:8265'") as raised:
        _join(LaunchConfig(address="http://127.0.0.1:8265"))
    assert (raised.value.setting, raised.value.value) == ("launch.address", "http://127.0.0.1:8265")
    monkeypatch.setenv("RAY_ADDRESS", "https://head:8265")
    with pytest.raises(NoCluster, match=r"RAY_ADDRESS is 'https://head:8265'.*Unset it"):
        _join(LaunchConfig())


def _join(settings: LaunchConfig) -> None:
    with cluster(settings):
        pass


def test_what_is_waited_for_is_said_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    monkeypatch.setattr(cluster_module, "NOTICE_S", 0.0)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(NoCluster, match="the variable RAY_ADDRESS"):
        _join(LaunchConfig(cluster_timeout_s=2.0))
    assert capsys.readouterr().err.count(f"waiting for a Ray cluster at 127.0.0.1:{port}") == 1


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens: it is bound as long as the test lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_that_is_too_long_for_sockets_gives_way_to_a_short_one(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(cluster_module, "gettempdir", lambda: os.environ["TMPDIR"])
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert _short_session_folder() == {}
    monkeypatch.setenv(variable, f"/tmp/{'x' * 100}")
    folder = Path(_short_session_folder()["_temp_dir"])
    assert folder.stat().st_uid == os.getuid()
    assert len(str(folder)) + cluster_module.SESSION_PATH_BYTES <= cluster_module.MAX_SOCKET_PATH_BYTES
    assert variable in capsys.readouterr().err


SIGNALLED = """
import os, signal, ray
from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster.cluster import cluster
from raystride.pipelines.system.signals import Terminated, raise_on_signals

start = ray.init

def signalled(*arguments, **options):
    context = start(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    return context

ray.init = signalled
try:
    with raise_on_signals(), cluster(LaunchConfig(mode="ray")):
        print("it started")
except Terminated:
    print("Terminated; aborted in", signal.getitimer(signal.ITIMER_REAL)[0])
finally:
    ray.shutdown()
"""


def test_a_sigterm_while_ray_starts_ends_as_one_before_and_after() -> None:
    """Ray's handlers ended the process with code 15, or aborted it three seconds later. In a process of its own: here Ray
    may have been started."""
    ended = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "Terminated; aborted in 0.0\n"), ended.stderr


JOINED = """
import os, subprocess, sys
import ray                                          # before there is a token: it reads its mode now
from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster.cluster import cluster, token_file, uses_running_cluster
from raystride.pipelines.launch.cluster.internals import listen_on_loopback

if sys.argv[1:]:
    with listen_on_loopback(), cluster(LaunchConfig(address=sys.argv[1])):
        print("joined", len(ray.nodes()), flush=True)
else:
    with cluster(LaunchConfig(address="local")):
        address = "127.0.0.1:" + ray.get_runtime_context().gcs_address.rpartition(":")[2]
        print("mode", oct(token_file().stat().st_mode)[-3:], uses_running_cluster(LaunchConfig(address="local")), flush=True)
        told = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        subprocess.run([sys.executable, __file__, address], check=True, env=told)
"""


@pytest.mark.long
def test_a_process_that_has_imported_ray_joins_a_cluster_with_a_token_and_starts_one(tmp_path: Path) -> None:
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": os.getcwd()},
    )
    assert (ended.returncode, ended.stdout) == (0, "mode 600 False\njoined 1\n"), ended.stderr
