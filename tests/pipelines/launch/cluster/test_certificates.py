"""Certificates of a cluster's hosts: two of one authority talk, anybody else does not; nobody else reads the keys."""

import contextlib
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from raystride.jobs.certificates import copy_command, main
from raystride.pipelines.config import SettingError
from raystride.pipelines.launch.cluster.certificates import days_left, make_certificates, ray_environment


def _server(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "host.pem", folder / "host.key")
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as by default since Python 3.13
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client(authority: Path, own: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if own is not None:
        context.load_cert_chain(own / "host.pem", own / "host.key")
    return context


def _heard(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """What a client hears that calls a server by a name; nothing where either refuses."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            taken, _ = listener.accept()
            with contextlib.suppress(OSError), server.wrap_socket(taken, server_side=True) as connection:
                connection.sendall(b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            plain = socket.create_connection(listener.getsockname(), timeout=10)
            with client.wrap_socket(plain, server_hostname=name) as connection:
                return connection.recv(5)
        except OSError:
            return b""
        finally:
            thread.join()


def test_hosts_of_one_authority_talk_and_others_do_not(tmp_path: Path) -> None:
    head, worker = make_certificates(tmp_path / "ours", ["10.0.0.1", "10.0.0.2,gpu-2.example"], "/etc/tls", 30)
    (later,) = make_certificates(tmp_path / "ours", ["fd00::3"], "/etc/tls", 30)
    (other,) = make_certificates(tmp_path / "theirs", ["10.0.0.1"], "/etc/tls", 30)
    for name in ("10.0.0.2", "gpu-2.example", "127.0.0.1", "localhost"):
        assert _heard(_server(worker), _client(head, head), name) == b"hello"
    assert _heard(_server(later), _client(head, head), "fd00::3") == b"hello"
    assert _heard(_server(worker), _client(head, head), "10.0.0.1") == b""  # a host that takes another's place
    assert _heard(_server(worker), _client(head, None), "10.0.0.2") == b""
    assert _heard(_server(worker), _client(head, other), "10.0.0.2") == b""
    assert _heard(_server(other), _client(head, head), "10.0.0.1") == b""


def test_a_hosts_folder_is_what_ray_asks_for_and_nobody_elses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "new" / "tls"
    assert main(["10.0.0.1", "10.0.0.2", "--output", str(place), "--at", str(place / "10.0.0.2")]) == 0
    assert f"scp -p {place}/10.0.0.1/* 10.0.0.1:{place}/10.0.0.2/" in capsys.readouterr().out
    script = f". {place}/10.0.0.2/ray.env; env | grep -E '^RAY_(USE_)?TLS'"
    told = dict(line.split("=", 1) for line in subprocess.check_output(["sh", "-c", script], text=True).splitlines())
    assert told.pop("RAY_USE_TLS") == "1"
    assert set(told) == {"RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"}
    assert all(Path(file).exists() for file in told.values())
    assert place.stat().st_mode & 0o777 == (place / "10.0.0.2").stat().st_mode & 0o777 == 0o700
    for key in place.rglob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600
    assert len(list(place.rglob("ca.key"))) == 1


@pytest.mark.parametrize(
    ("hosts", "days", "flag", "said"),
    [
        (["../10.0.0.1"], 30, "hosts", "'../10.0.0.1' is no host"),
        (["gpu-2.example"], 30, "hosts", "'gpu-2.example' begins with a name"),
        (["10.0.0.1,a b"], 30, "hosts", "'10.0.0.1,a b' is no host"),
        ([""], 30, "hosts", "'' is no host"),
        (["10.0.0.1"], 0, "days", "--days is 0"),
    ],
)
def test_what_can_be_no_certificate_is_refused_before_anything_is_written(
    hosts: list[str], days: int, flag: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=said) as raised:
        make_certificates(tmp_path / "tls", hosts, "/etc/tls", days)
    assert (raised.value.setting, raised.value.value) == (flag, days if flag == "days" else hosts[0])
    assert not (tmp_path / "tls").exists()


def test_an_authority_that_is_not_whole_is_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["10.0.0.1"], "/etc/tls", 30)
    make_certificates(tmp_path / "other", ["10.0.0.1"], "/etc/tls", 30)
    with pytest.raises(SettingError, match="--days is 5000") as raised:
        make_certificates(tmp_path, ["10.0.0.1"], "/etc/tls", 5000)
    assert (raised.value.setting, raised.value.value) == ("days", 5000)
    (tmp_path / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(SettingError, match=r"ca\.key is not .*--output") as raised:
        make_certificates(tmp_path, ["10.0.0.1"], "/etc/tls", 30)
    assert (raised.value.setting, raised.value.value) == ("output", tmp_path)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(SettingError, match="authority") as raised:
        make_certificates(tmp_path, ["10.0.0.1"], "/etc/tls", 30)
    assert (raised.value.setting, raised.value.value) == ("output", tmp_path)
    assert not (tmp_path / "ca.key").exists()


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1"])
def test_the_copy_that_is_printed_replaces_what_is_there(host: str, tmp_path: Path) -> None:
    """Run for real, with an ssh that runs its words here and an scp that copies to the path behind the host's colon."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    strip = "${target#\\[*\\]:}" if ":" in host else "${target#*:}"
    (programs / "scp").write_text(
        f'#!/bin/bash\nargs=("$@")\ntarget="${{args[-1]}}"\nunset "args[-1]"\ncp "${{args[@]}}" "{strip}"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    there = tmp_path / "etc" / "it's here"
    for _ in range(2):
        (folder,) = make_certificates(tmp_path / "my tls", [host], str(there), 30)
        command = copy_command(folder, str(there))
        subprocess.run(["bash", "-c", command], env={"PATH": f"{programs}:/usr/bin:/bin"}, check=True)
        assert (there / "host.pem").read_bytes() == (folder / "host.pem").read_bytes()
        assert sorted(path.name for path in there.iterdir()) == ["ca.pem", "host.key", "host.pem", "ray.env"]


def test_the_days_that_a_certificate_has_left_are_known_where_ray_talks_tls(tmp_path: Path) -> None:
    (folder,) = make_certificates(tmp_path, ["10.0.0.1"], str(tmp_path / "10.0.0.1"), 20)
    variables = ray_environment(str(folder))
    assert days_left(variables) == pytest.approx(20, abs=0.1)
    assert days_left(variables | {"RAY_USE_TLS": "0"}) is None
    (folder / "host.pem").write_text("nothing")
    assert days_left(variables) is None
    assert days_left({}) is None
