"""Per-node relay to the recorder: one worker batches the calls of all workers of its node.

Without it one process could answer a tenth of the calls of 8,000 workers. The first worker to come is the leader: it listens
on a socket in a folder that only its user can read, collects the calls of its node for a moment, and sends them in one. If
it dies, another worker becomes the leader; if it does not answer, the others call the recorder directly for a while. The
recorder recognises entries that it receives twice by their sequence numbers.

    relay = Relay(send_calls, token, world=8192)              # send_calls([("receive", arguments), ...]) -> [Receipt, ...]
    relay.call("receive", sender, entries, recorder, urgent)  # the recorder's answer, or raises what `send_calls` raised
"""

import atexit
import fcntl
import math
import os
import queue
import shutil
import socket
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from raystride.pipelines.config import SettingError
from raystride.pipelines.system.errors import picklable_error
from raystride.pipelines.system.node_folder import ensure_private

MAX_DIRECT = 64
"""Up to this number of workers, each calls the recorder directly."""
MAX_CALLS_PER_S = 400.0
"""Calls per second of all nodes together; it sets the pause of a node between two calls."""
ANSWER_TIMEOUT_S = 25.0
"""Seconds that an answer may take beyond that pause: longer than two calls that both reach the recorder's timeout."""
DIRECT_S = 60.0
"""Seconds that a worker calls the recorder directly after its leader did not answer."""
MAX_FOLDER_BYTES = 40
"""Maximum length of a temporary folder's path for sockets: Linux allows 107 bytes for the whole path of a socket."""
MAX_TRIES = 20
"""Attempts, 0.05 s apart, to reach a leader that is just starting."""

MIN_DEAD_AGE_S = 60.0
"""Age in seconds at which an unlocked folder counts as dead; by then a new leader surely holds its lock."""

Call = tuple[str, tuple[Any, ...]]
"""A method of the recorder, and its arguments."""


class LeaderTimeout(Exception):
    """The node's leader did not answer in time."""


class LeaderDied(Exception):
    """The node's leader died during a call."""


class Relay:
    """A worker's client of the recorder, through its node's leader. `token` identifies the run. Thread-safe."""

    def __init__(self, send_calls: Callable[[list[Call]], list[Any]], token: str, world: int) -> None:
        self._send_calls, self._world = send_calls, world
        self._folder = _relay_root() / blake2b(f"{token} {socket.gethostname()}".encode(), digest_size=8).hexdigest()
        self._socket_path = str(self._folder / "socket")
        self._call_queue: queue.SimpleQueue[tuple[Call, int, Future[Any]]] | None = None
        self._lock = threading.Lock()
        self._direct_until = 0.0

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls the recorder, directly if no leader is found; returns its answer or raises the call's error."""
        call: Call = (method, arguments)
        if time.monotonic() < self._direct_until:
            return self._send_calls([call])[0]
        for _ in range(MAX_TRIES):
            if self._call_queue is not None:
                return self._submit_call(call, os.getpid()).result()
            try:
                return self._forward_to_leader(call)
            except (FileNotFoundError, ConnectionRefusedError):
                try:
                    is_leader = self._try_to_lead()
                except (OSError, SettingError) as error:
                    self._direct_until = math.inf
                    warnings.warn(f"each of this node's workers calls the recorder by itself: {error}", stacklevel=2)
                    break
                if not is_leader:
                    time.sleep(0.05)
            except LeaderTimeout:
                self._direct_until = time.monotonic() + DIRECT_S
                break
            except LeaderDied:
                break
        return self._send_calls([call])[0]

    def _forward_to_leader(self, call: Call) -> Any:
        """Sends a call through the leader. Raises the call's error, OSError, LeaderTimeout or LeaderDied."""
        with Client(self._socket_path, "AF_UNIX") as connection:
            if not _is_same_user(connection):
                raise LeaderDied
            try:
                connection.send((call, os.getpid()))
                if not connection.poll(ANSWER_TIMEOUT_S + self._world / MAX_CALLS_PER_S):
                    raise LeaderTimeout
                answer, failed = connection.recv()
            except (OSError, EOFError):
                raise LeaderDied from None
        if failed:
            raise answer
        return answer

    def _try_to_lead(self) -> bool:
        """Makes this process the leader, which holds a lock while it lives; returns False if another process is."""
        with self._lock:
            if self._call_queue is not None:
                return True
            ensure_private(self._folder.parent)
            ensure_private(self._folder)
            lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            with suppress(FileNotFoundError):
                os.unlink(self._socket_path)  # left by a leader that died
            _remove_dead_folders(self._folder)
            listener = Listener(self._socket_path, "AF_UNIX", backlog=128)
            self._call_queue = queue.SimpleQueue()
            atexit.register(self._remove_folder, listener)
            for target, argument in ((self._accept_connections, listener), (self._deliver_batches, self._call_queue)):
                threading.Thread(target=target, args=(argument,), name="relay", daemon=True).start()
            return True

    def _submit_call(self, call: Call, process: int) -> "Future[Any]":
        assert self._call_queue is not None
        future: Future[Any] = Future()
        self._call_queue.put((call, process, future))
        return future

    def _accept_connections(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError):  # the worker has gone, or this process ends
                time.sleep(0.05)
                continue
            threading.Thread(target=self._serve_connection, args=(connection,), name="relay", daemon=True).start()

    def _remove_folder(self, listener: Listener) -> None:
        """Closes the listener and removes this leader's folder."""
        with suppress(OSError):
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve_connection(self, connection: Connection) -> None:
        """Answers the call of another worker."""
        with suppress(OSError, EOFError), connection:
            if not _is_same_user(connection):  # before anything that it sends is unpickled
                return
            call, process = connection.recv()
            try:
                answer = self._submit_call(call, process).result(), False
            except Exception as error:
                answer = picklable_error(error), True
            connection.send(answer)

    def _deliver_batches(self, waiting: "queue.SimpleQueue[tuple[Call, int, Future[Any]]]") -> None:
        """Sends all calls since the last batch in one call to the recorder, for ever."""
        workers = {os.getpid()}
        while True:
            batch = [waiting.get()]
            # The number of nodes is estimated: all are taken to have as many workers as this one.
            time.sleep(self._world / len(workers) / MAX_CALLS_PER_S)
            while not waiting.empty():
                batch.append(waiting.get())
            workers |= {process for _, process, _ in batch}
            try:
                answers = self._send_calls([call for call, _, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)


def _relay_root() -> Path:
    """Returns the folder of this user's sockets; not `$RAYSTRIDE_CACHE`, which may have a long path or be a network disk."""
    temporary = tempfile.gettempdir()
    return Path(temporary if len(os.fsencode(temporary)) <= MAX_FOLDER_BYTES else "/tmp") / f"raystride-{os.getuid()}-relays"  # noqa: S108


def _is_same_user(connection: Connection) -> bool:
    """Returns whether the peer is a process of the same user."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _remove_dead_folders(own_folder: Path) -> None:
    """Removes folders of killed leaders of other runs: nobody holds their locks."""
    for folder in own_folder.parent.iterdir():
        with suppress(OSError):
            if folder != own_folder and time.time() - folder.stat().st_mtime > MIN_DEAD_AGE_S:
                with (folder / "lock").open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
