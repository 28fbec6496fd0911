"""One driver a run: the second is told who trains it, the dead are taken over from at once, and a race has one winner."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from raystride.pipelines.launch.hang.process import process_start_ticks
from raystride.pipelines.launch.run_store import lease as owner
from raystride.pipelines.launch.run_store.lease import (
    DriverIsolated,
    Owner,
    RunLease,
    RunLocked,
    find_successor,
    read_owner,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.fence import Claim, claim_checkpoints
from tests.errors import refused
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[4]
DRIVER = """
import sys, time
from pathlib import Path
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.launch.run_store.lease import RunLease, RunLocked
import psutil  # so that those who race are ready
folder, attempt, gate = sys.argv[1:]
print("ready", flush=True)
while gate and not Path(gate).exists():
    time.sleep(0.001)
try:
    RunLease.acquire(Folder(folder), attempt)
    print("taken", flush=True)
except RunLocked as refusal:
    print(refusal, flush=True)
sys.stdin.read()
"""

StartDriver = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A run's folder, called `run`."""
    return Folder(str(tmp_path / "run"))


@pytest.fixture
def start_driver(folder: Folder) -> Iterator[StartDriver]:
    """Starts processes that try to own the run, print what came of it, and live until the test ends."""
    started = []

    def start(attempt: str, gate: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, folder.uri, attempt, gate],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert _line(process) == "ready"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def _write(folder: Folder, **changes: object) -> None:
    with owner._exclusive(folder):  # as a driver that takes over: not between a renewal's read and its write
        _write_within(folder, **changes)


def _write_within(folder: Folder, **changes: object) -> None:
    folder.put_json("owner.json", asdict(Owner.this_process("earlier")) | changes)


def test_a_second_driver_is_told_who_trains(folder: Folder, start_driver: StartDriver) -> None:
    with RunLease.acquire(folder, "first"):
        said = _line(start_driver("second"))
    for part in ("run run", f"process {os.getpid()}", socket.gethostname(), "first", "--run"):
        assert part in said


def test_a_killed_driver_is_taken_over_from_at_once_even_as_a_zombie(folder: Folder, start_driver: StartDriver) -> None:
    first = start_driver("first")
    assert _line(first) == "taken"
    with refused("run", "run", names=[f"process {first.pid} ", "first", "--run"]) as raised:
        RunLease.acquire(folder, "second")
    assert isinstance(raised.value, RunLocked)
    assert raised.value.owner
    assert (raised.value.owner.pid, raised.value.owner.attempt) == (first.pid, "first")
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected by its parent
    with RunLease.acquire(folder, "second"):
        assert _attempt(folder) == "second"
    assert first.poll() is not None


def test_a_process_number_that_is_used_again_owns_nothing(folder: Folder) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks
    _write(folder, ticks=ticks - 100)
    with RunLease.acquire(folder, "now"):
        assert _attempt(folder) == "now"


def test_an_owner_elsewhere_is_believed_while_its_file_changes_whatever_its_clock_says(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the same host name in another container, and one whose clock is a year behind."""
    monkeypatch.setattr(owner, "LEASE_S", 1.0)
    monkeypatch.setattr(owner, "POLL_S", 0.05)
    long_ago, ended, said = time.time() - 365 * 86400, threading.Event(), list[str]()

    def renew() -> None:
        beat = 0
        while not ended.wait(0.2):
            beat += 1
            _write(folder, machine="another container", renewed=long_ago + beat)

    _write(folder, machine="another container", renewed=long_ago)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RunLocked, match=rf"process {os.getpid()} on .*\(attempt earlier\)") as raised:
            RunLease.acquire(folder, "now", said.append)
    finally:
        ended.set()
        thread.join()
    assert raised.value.owner
    assert (raised.value.owner.pid, raised.value.owner.attempt) == (os.getpid(), "earlier")
    assert f"process {os.getpid()} " in said[0]
    _write(folder, machine="another container", renewed=time.time() + 86400)  # its clock is ahead, and it is dead
    with RunLease.acquire(folder, "now"):
        assert _attempt(folder) == "now"


def test_a_file_of_an_earlier_version_is_watched_too(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = {"host": "elsewhere", "pid": 1, "start": 1.0, "attempt": "earlier", "renewed": time.time()}
    folder.put_json("owner.json", earlier)
    found = read_owner(folder)
    assert found
    assert not found.is_dead
    assert not found.is_local
    monkeypatch.setattr(owner, "LEASE_S", 0.1)
    with RunLease.acquire(folder, "now"):
        assert _attempt(folder) == "now"


def test_who_was_taken_over_hears_of_it_and_leaves_the_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 0.02)
    with RunLease.acquire(folder, "mine") as mine:
        mine.permit.raise_if_revoked()
        _write(folder, attempt="theirs", machine="another", host="elsewhere.example")
        with pytest.raises(RunLocked, match=r"elsewhere\.example .* run run .*saves nothing") as raised:
            _until(mine.permit.raise_if_revoked)
        assert raised.value.owner
        assert (raised.value.owner.host, raised.value.owner.attempt) == ("elsewhere.example", "theirs")
    assert _attempt(folder) == "theirs"


def test_who_cannot_write_for_a_while_says_so_once_and_goes_on(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 0.02)
    with RunLease.acquire(folder, "mine") as mine:
        assert folder.local
        (folder.local / "owner.json").unlink()
        (folder.local / "owner.json").mkdir()  # neither read nor written
        looks: list[Folder] = []
        read = owner._read_file
        monkeypatch.setattr(owner, "_read_file", lambda folder: (looks.append(folder), read(folder))[1])
        wait_until(lambda: len(looks) > 3, "looks at what cannot be read")
        mine.permit.raise_if_revoked()
        (folder.local / "owner.json").rmdir()
        wait_until(lambda: read_owner(folder), "the owner, written again")
        assert _attempt(folder) == "mine"
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning: lease of run: \w+Error: .*; tried again", line)


def _until(check: Callable[[], None]) -> None:
    """Calls it until it raises."""
    wait_until(check, "an error")


def test_the_lease_is_renewed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 0.02)
    with RunLease.acquire(folder, "now"):
        first = read_owner(folder)
        assert first
        wait_until(lambda: (newest := read_owner(folder)) and newest.renewed > first.renewed, "a renewed lease")


def test_release_leaves_the_run_free_and_another_owner_alone(folder: Folder) -> None:
    mine = RunLease.acquire(folder, "mine")
    mine.release()
    assert read_owner(folder) is None
    mine = RunLease.acquire(folder, "mine")
    _write(folder, attempt="theirs")
    mine.release()
    assert _attempt(folder) == "theirs"


@pytest.mark.parametrize("content", ["", '{"host": "x"', "[]", json.dumps({"host": "x", "unknown": 1})])
def test_a_damaged_owner_file_stops_nobody(folder: Folder, content: str) -> None:
    folder.put("owner.json", content)
    with RunLease.acquire(folder, "now"):
        assert _attempt(folder) == "now"


def test_of_several_that_race_exactly_one_wins(folder: Folder, start_driver: StartDriver, tmp_path: Path) -> None:
    for turn in range(3):
        gate = tmp_path / f"gate-{turn}"
        racers = [start_driver(f"racer{turn}{number}", str(gate)) for number in range(4)]
        gate.touch()
        said = [_line(racer) for racer in racers]
        assert sorted(line == "taken" for line in said) == [False, False, False, True]
        winner = racers[said.index("taken")]
        assert all(f"process {winner.pid} " in line for line in said if line != "taken")
        for racer in racers:
            racer.kill()
            racer.wait()


def test_a_driver_that_was_given_up_takes_nothing_back(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write hangs for longer than the lease, as a hard mount's does, and comes after another one's."""
    store = Folder(f"memory://owner{folder.uri}")  # which has no lock that would keep the other one out meanwhile
    monkeypatch.setattr(owner, "LEASE_S", 0.2)
    monkeypatch.setattr(owner, "POLL_S", 0.02)
    monkeypatch.setattr(owner, "RENEW_S", 3600.0)
    old = RunLease.acquire(store, "old")
    _elsewhere(monkeypatch)
    real, news = Folder.put, list[RunLease]()

    def hang(place: Folder, name: str, content: bytes | str) -> None:
        monkeypatch.setattr(Folder, "put", real)
        news.append(RunLease.acquire(store, "new"))
        real(place, name, content)

    monkeypatch.setattr(Folder, "put", hang)
    old._renew_once()
    (new,) = news
    assert _attempt(store) == "old"  # for the moment
    new._renew_once()
    new.permit.check()
    assert _attempt(store) == "new"
    old._renew_once()
    with pytest.raises(RunLocked, match="taken over"):
        old.permit.check()
    old.release()
    assert _attempt(store) == "new"
    assert new.owner.term == old.owner.term + 1


def test_a_driver_before_the_newest_claim_owns_nothing_without_an_owner_file(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor claimed the checkpoints and was killed, and the file that nobody renewed was removed by hand."""
    monkeypatch.setattr(owner, "RENEW_S", 3600.0)
    hung = RunLease.acquire(folder, "hung")
    claim_checkpoints(folder / "checkpoints", Claim("killed", "0f3e", hung.owner.term + 1))
    folder.remove("owner.json")
    assert hung._renew_once()
    assert not folder.exists("owner.json")
    with pytest.raises(RunLocked, match="another process has taken over run run"):
        hung.permit.check()
    folder.put("checkpoints/attempt", "damaged")  # says nothing of who comes later: commits are refused by it
    with RunLease(folder, "other") as other:
        assert find_successor(folder, "other", other.owner.term) is None


def test_a_driver_that_hung_does_not_bring_back_a_run_that_its_successor_removed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 3600.0)
    hung = RunLease.acquire(folder, "hung")
    _write(folder, ticks=1)  # as dead
    with RunLease.acquire(folder, "new") as new:
        new.remove_run()
    assert hung._renew_once()
    assert not folder.exists()
    with pytest.raises(RunLocked, match="the folder of run run was removed"):
        hung.permit.raise_if_revoked()
    hung.release()
    assert not folder.exists()


def test_a_renewal_and_a_release_wait_for_one_that_takes_over_on_a_disk(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "RENEW_S", 3600.0)
    mine = RunLease.acquire(folder, "mine")
    with owner._exclusive(folder):
        threads = [threading.Thread(target=mine._renew_once), threading.Thread(target=mine.release)]
        for thread in threads:
            thread.start()
        _write_within(folder, attempt="theirs", term=mine.owner.term + 1)
        threads[0].join(0.2)
        assert threads[0].is_alive()
    for thread in threads:
        thread.join()
    assert _attempt(folder) == "theirs"


def test_a_file_that_is_away_for_a_moment_is_no_release(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rename replaces nothing, the file is deleted first: a look between the two finds none."""
    store = Folder(f"memory://away{folder.uri}")
    store.put("config.yaml", "a run")
    monkeypatch.setattr(owner, "LEASE_S", 0.2)
    monkeypatch.setattr(owner, "POLL_S", 0.02)
    real, looks = Folder.read, iter([False])

    def read(place: Folder, name: str) -> bytes:
        if next(looks, True):
            _write(store, attempt="theirs", machine="another", renewed=time.time())
            return real(place, name)
        raise FileNotFoundError(name)

    monkeypatch.setattr(Folder, "read", read)
    with pytest.raises(RunLocked, match="attempt theirs"):
        RunLease.acquire(store, "now")
    store.remove("owner.json")
    monkeypatch.setattr(Folder, "read", real)
    RunLease.acquire(store, "now").release()


def test_a_job_that_was_submitted_again_waits_for_the_owner_s_end(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LOST_NODE_S", 0.5)  # and no longer
    monkeypatch.setattr(owner, "POLL_S", 0.02)
    monkeypatch.setattr(owner, "NOTICE_S", 0.2)
    ended, said = threading.Event(), list[str]()

    def renew() -> None:
        while not ended.wait(0.05):
            _write(folder, machine="another", host="h2", pid=155, term=7, renewed=time.time())

    _write(folder, machine="another", host="h2", pid=155, term=7, renewed=time.time())
    thread = threading.Thread(target=renew)
    thread.start()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            ended.set()

    with RunLease.acquire(folder, "again", say, wait=True) as mine:
        assert mine.owner.term == 8
    thread.join()
    assert len(said) == 2
    assert all("process 155 on h2 still trains" in line for line in said)


def test_who_gives_up_is_followed_at_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = RunLease.acquire(folder, "mine")
    _elsewhere(monkeypatch)
    waited: list[str] = []
    other = threading.Thread(target=lambda: RunLease.acquire(folder, "next", waited.append).release())
    mine.give_up("for 20 s nothing was heard")
    with pytest.raises(DriverIsolated, match="for 20 s nothing was heard: this driver ends and saves nothing more"):
        mine.permit.raise_if_revoked()
    other.start()
    other.join()
    assert waited == []
    assert read_owner(folder) is None


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is on another machine than before."""
    monkeypatch.setattr(owner, "machine_id", lambda: "the other machine")


def _attempt(folder: Folder) -> str:
    found = read_owner(folder)
    assert found
    return found.attempt
