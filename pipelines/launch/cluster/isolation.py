"""Detects that the driver is cut off from its cluster, or that the head that it has started has ended.

Cut off, another driver may resume the run, and this one must give it up:

    with IsolationWatcher(recorder.heartbeats, recorder.node_id, lease.give_up, screen.warn):
        train()

After a network partition the driver and its recorder, on the same host, stay alive. The driver is isolated if for
`ISOLATED_S` seconds the head's host does not answer and no worker on another host sends heartbeats. A restarting head
refuses connections, and that counts as an answer; if the head is lost, heartbeats of other hosts' workers still arrive.
"""

import socket
import time
from collections.abc import Callable, Mapping

from raystride.pipelines.launch.hang.heartbeat import ENDED, Heartbeat
from raystride.pipelines.system.service_thread import ServiceThread

ISOLATED_S = 20.0
"""Seconds of silence: four heartbeats, and as long as the head takes to give up a host."""
POLL_S = 2.0
MAX_REFUSALS = 3
"""Refused connections in a row, `POLL_S` apart, after which a head that this process has started has ended."""
CONNECT_TIMEOUT_S = 3.0
"""Seconds within which the head's host must answer."""


class IsolationWatcher(ServiceThread):
    """Thread that runs during the block and calls `on_isolated` once with the reason."""

    def __init__(
        self,
        heartbeats: Callable[[], Mapping[int, Heartbeat]],
        node_id: str,
        on_isolated: Callable[[str], None],
        log: Callable[[str], None],
        *,
        head: tuple[str, int] | None = None,
    ) -> None:
        """`node_id` is the driver's node. `head` defaults to the address of Ray's head, and then needs ray.init."""
        super().__init__("isolation", self._poll, every_s=POLL_S, max_pause_s=POLL_S, log=log)
        self._heartbeats, self._node_id, self._on_isolated = heartbeats, node_id, on_isolated
        self._head = head or _head_address()
        self._answered_at = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        """By rank of each worker on another host: number and arrival time of its newest heartbeat."""

    def __exit__(self, *error: object) -> None:
        self.stop()  # without waiting for a poll in progress: a recorder that is away takes half a minute

    def _poll(self) -> None:
        try:
            self._record_heartbeats()
        finally:  # also while the recorder is restarting
            self._check_silence()

    def _check_silence(self) -> None:
        if _is_reachable(*self._head):
            self._answered_at = time.monotonic()
        silent_s = time.monotonic() - self._answered_at
        if silent_s > ISOLATED_S and self._others_are_silent():
            self.stop()
            self._on_isolated(f"for {silent_s:.0f} s neither the head nor any worker on another host was heard")

    def _record_heartbeats(self) -> None:
        others = {
            rank: heartbeat.number
            for rank, heartbeat in self._heartbeats().items()
            if heartbeat.process.node_id != self._node_id and heartbeat.current_phase != ENDED
        }
        now = time.monotonic()
        self._heard = {
            rank: known if (known := self._heard.get(rank)) and known[0] == number else (number, now)
            for rank, number in others.items()
        }

    def _others_are_silent(self) -> bool:
        """Returns whether there are workers on other hosts and none of them has sent a heartbeat for `ISOLATED_S`."""
        times = [heard_at for _, heard_at in self._heard.values()]
        return bool(times) and time.monotonic() - max(times) > ISOLATED_S


class HeadLost(RuntimeError):
    """Ray's head, which this command had started, has ended; the message says so."""


class HeadWatch:
    """Notices the end of a Ray head that this process has started, which nobody starts again.

    Without it Ray would end this process a minute later, before it has closed the record.
    """

    def __init__(self, head: tuple[str, int] | None = None) -> None:
        """`head` defaults to the address of Ray's head, and then needs ray.init."""
        self._head, self._refusals, self._due = head or _head_address(), 0, 0.0

    def check(self) -> None:
        """Connects every `POLL_S` seconds. Raises HeadLost."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + POLL_S
        try:
            socket.create_connection(self._head, timeout=CONNECT_TIMEOUT_S).close()
            self._refusals = 0
        except ConnectionRefusedError:
            self._refusals += 1
        except OSError:  # a machine that is short of ports or memory says nothing of the head
            return
        if self._refusals >= MAX_REFUSALS:
            host, port = self._head
            raise HeadLost(f"Ray on this machine has ended (nobody answers at {host}:{port})")


def _is_reachable(host: str, port: int) -> bool:
    """Returns whether a host answers; a refused connection counts as an answer."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _head_address() -> tuple[str, int]:
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)
