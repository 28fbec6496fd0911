"""Whether the driver still reaches its cluster: another one may go on with the run by then, and this one must let it.

    with IsolationWatch(recorder.heartbeats, recorder.node_id, ownership.give_up):
        train()

A driver whose host was cut off lives on, and its recorder with it, on the same host. It is isolated if the head's host does
not answer and no worker on another host was heard, both for `ISOLATED_S` seconds. A head that starts again refuses
connections, which is an answer; a lost head leaves the other hosts' workers to be heard.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from raystride.pipelines.hang.heartbeat import ENDED, Heartbeat

ISOLATED_S = 20.0
"""Seconds of silence: four heartbeats, and as long as the head takes to give a host up."""
LOOK_S = 2.0
ANSWER_S = 3.0
"""Seconds in which the head's host has to answer."""


class IsolationWatch(contextlib.AbstractContextManager["IsolationWatch"]):
    """Looks in a thread for as long as the block runs, and calls `isolated` once with the reason."""

    def __init__(
        self,
        heartbeats: Callable[[], Mapping[int, Heartbeat]],
        node_id: str,
        isolated: Callable[[str], None],
        *,
        head: tuple[str, int] | None = None,
    ) -> None:
        """`node_id` is the driver's node. The head is Ray's, unless it is given. Needs ray.init then."""
        self._heartbeats, self._node_id, self._isolated = heartbeats, node_id, isolated
        self._head = head or _address_of_head()
        self._ended = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}
        """The newest heartbeat's number of each worker on another host, and when it came."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="isolation", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(Exception):  # the recorder may be starting again
                self._hear()
            if _answers(*self._head):
                answered = time.monotonic()
            silent_s = time.monotonic() - answered
            if silent_s > ISOLATED_S and self._others_are_silent():
                self._isolated(f"for {silent_s:.0f} s neither the head nor any worker on another host was heard")
                return

    def _hear(self) -> None:
        others = {
            rank: heartbeat.number
            for rank, heartbeat in self._heartbeats().items()
            if heartbeat.process.node_id != self._node_id and heartbeat.inside != ENDED
        }
        now = time.monotonic()
        self._heard = {
            rank: known if (known := self._heard.get(rank)) and known[0] == number else (number, now)
            for rank, number in others.items()
        }

    def _others_are_silent(self) -> bool:
        """Whether there are workers on other hosts, and none of them was heard for long."""
        times = [heard_at for _, heard_at in self._heard.values()]
        return bool(times) and time.monotonic() - max(times) > ISOLATED_S


def _answers(host: str, port: int) -> bool:
    """Whether a host answers, be it that nobody listens there."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _address_of_head() -> tuple[str, int]:
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)
