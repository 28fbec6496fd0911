"""Calls of a node's workers through a leader: none lost, none repeated, few calls, and a dead leader is replaced."""

import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Sender, read_entries, relay
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.relay import Call, Relay
from raystride.pipelines.system.storage.folder import Folder
from tests.distributed import LIMIT_S
from tests.fork_server import CONTEXT
from tests.pipelines.observability.record.conftest import RecorderProcess
from tests.waiting import wait_until

WORKERS, ENTRIES = 4, 30


def _worker(rank: int, recorder: Any, token: str, place: Path, killed: bool) -> None:
    """Puts its entries through its node's leader, and keeps count of the calls that this process makes.

    Where the leader is to be `killed`, the others have something left to say then.
    """
    calls = 0

    def tell(batch: list[Call]) -> list[Any]:
        nonlocal calls
        calls += 1
        return [getattr(recorder, method)(*arguments) for method, arguments in batch]

    through = Relay(tell, token, 80)

    def post(*given: Any) -> Any:
        receipt = through.call("receive", *given)
        (place / f"answered-{rank}").touch()
        return receipt

    sender = Sender(post, f"rank{rank}", interval_s=0.02)
    for step in range(ENTRIES):
        if killed and step == ENTRIES // 2:
            wait_until((place / "killed").exists, "the leader's end")
        sender.put(new_entry("metrics", {"train_loss": float(rank)}, step=step))
        time.sleep(0.001)  # they come in many posts
    sender.put(new_entry("error", {"text": "urgent, so that it is written at once"}))
    assert sender.close(60.0)
    (place / f"calls-{rank}").write_text(str(calls))
    wait_until((place / "enough").exists, "all workers")  # the leader stays for the others


def _count(place: Path, name: str) -> int:
    return len(list(place.glob(f"{name}-*")))


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the test's sockets, with a short name: a socket's path has room for a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as place:
        monkeypatch.setattr(relay, "_relay_root", lambda: Path(place) / "relays")
        yield Path(place) / "relays"


@pytest.fixture
def recorder(storage: Folder, folder: Folder) -> Any:
    """A recorder in a process of its own."""
    manager = RecorderProcess(ctx=CONTEXT)
    manager.start()
    yield manager.Recorder(folder, "r", "a1", RecordConfig(mlflow=False), storage, {}, {}, None)  # type: ignore[attr-defined]
    manager.shutdown()


@pytest.mark.parametrize("killed", [False, True])
def test_all_is_recorded_once_and_in_order(
    killed: bool, recorder: Any, folder: Folder, tmp_path: Path, sockets: Path
) -> None:
    token, place = uuid4().hex[:8], tmp_path
    processes = []
    for rank in range(WORKERS):
        arguments = rank, recorder, token, place, killed
        processes.append(CONTEXT.Process(target=_start, args=(sockets, *arguments)))
        processes[-1].start()
        if not rank:  # the first one leads
            wait_until(lambda: _count(place, "answered") == 1, "the leader")
    wait_until(lambda: _count(place, "answered") == WORKERS, "an answer to each worker")
    if killed:
        processes[0].kill()
        processes[0].join()
        (place / "killed").touch()
    wait_until(lambda: _count(place, "calls") == WORKERS - killed, "all workers")
    (place / "enough").touch()
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL if killed else 0, 0, 0, 0]
    recorder.finish("finished")
    entries = read_entries(folder)
    for rank in range(killed, WORKERS):
        own = [entry for entry in entries if entry["sender"].startswith(f"rank{rank}.")]
        assert [entry["sequence"] for entry in own] == list(range(1, ENTRIES + 2))
    calls = [int((place / f"calls-{rank}").read_text()) for rank in range(killed, WORKERS)]
    if not killed:
        assert calls[0] > 0
        assert calls[1:] == [0, 0, 0]


def _start(sockets: Path, *arguments: Any) -> None:
    relay._relay_root = lambda: sockets
    _worker(*arguments)


def test_an_error_is_everybody_s_who_was_in_the_call() -> None:
    def refuse(batch: list[Call]) -> list[Any]:
        raise ConnectionError(f"{len(batch)} calls")

    leader, follower = (Relay(refuse, "same", 80) for _ in range(2))
    for member in (leader, follower, leader):
        with pytest.raises(ConnectionError, match="1 calls"):
            member.call("receive", "rank0", [], "")
    assert leader._call_queue is not None
    assert follower._call_queue is None


def test_a_leader_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ANSWER_TIMEOUT_S", 0.2)
    stands, goes_on = threading.Event(), threading.Event()

    def stand_still(batch: list[Call]) -> list[Any]:
        if stands.is_set():
            goes_on.wait()
        return [0] * len(batch)

    leader = Relay(stand_still, "same", 80)
    assert leader.call("heartbeat", 0) == 0
    stands.set()
    follower = Relay(lambda batch: [1] * len(batch), "same", 80)
    assert follower.call("heartbeat", 1) == follower.call("heartbeat", 2) == 1
    assert follower._call_queue is None
    goes_on.set()


def test_what_a_killed_leader_left_is_cleared_by_the_next(sockets: Path) -> None:
    left, young = (sockets / name for name in ("left", "young"))
    for folder in (left, young):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    os.utime(left, (1.0, 1.0))
    assert Relay(lambda batch: [0] * len(batch), "own", 80).call("heartbeat", 0) == 0
    assert (left.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("temporary", ["/tmp", "/scratch/" + "long" * 30])
def test_sockets_lie_in_a_place_with_a_short_name(temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.setattr("socket.gethostname", lambda: "a-pod-with-the-longest-name-" + "0" * 35)
    monkeypatch.setenv("RAYSTRIDE_CACHE", "/nowhere/" + "long" * 30)
    assert len(Relay(lambda batch: [], f"{uuid4()}", 80)._socket_path) < 100


def test_where_no_socket_can_be_each_goes_by_itself_and_says_so_once(sockets: Path) -> None:
    sockets.symlink_to("/tmp")
    own = Relay(lambda batch: [call for _, call in batch], "token", 80)
    with pytest.warns(UserWarning, match="by itself: .* is a link"):
        assert own.call("heartbeat", 7) == (7,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own.call("heartbeat", 8) == (8,)


def test_another_user_s_process_is_neither_heard_nor_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side takes the other one for another user's process: the kernel tells the user."""
    leader, follower = (Relay(lambda batch, who=who: [who] * len(batch), "same", 80) for who in ("leader", "follower"))
    assert leader.call("heartbeat", 0) == "leader"
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert follower.call("heartbeat", 0) == "follower"
