"""One worker of a node calls the recorder for all of them: of eight thousand workers' calls a process answers a tenth.

Whichever worker comes first leads: it listens on a socket in a folder that is its user's alone, gathers what the others of
its node have to say for a moment, and says it in one call. When it dies, the next one leads; where it stands still, others
go by themselves for a while. What the recorder gets twice by that it knows by its number.

    relay = Relay(tell, token, world=8192)                    # tell([("receive", arguments), ...]) -> [Receipt, ...]
    relay.call("receive", sender, entries, recorder)          # what the recorder answered, or raises what `tell` raised
"""

import atexit
import copy
import fcntl
import math
import os
import pickle
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
from raystride.pipelines.node_folder import open_private

MOST_DIRECT = 64
"""Workers up to which each calls the recorder by itself."""
CALLS_A_SECOND = 400.0
"""Of all nodes together: a node waits for as long between two as makes it so many."""
ANSWER_S = 25.0
"""How long an answer may take beyond that: longer than two calls of which each meets the recorder's limit."""
ALONE_S = 60.0
"""How long a worker goes by itself when its leader has stood still."""
MAX_FOLDER = 40
"""Bytes of a temporary folder's path in which sockets may lie: Linux takes 107 of a socket's whole path."""
TRIES = 20
"""Looks, a twentieth of a second apart, for a leader that is just beginning."""

YOUNG_S = 60.0
"""Seconds in which a leader that has just made its folder surely holds its lock."""

Call = tuple[str, tuple[Any, ...]]
"""A method of the recorder, and its arguments."""


class LeaderStandsStill(Exception):
    """Of a leader that stands still."""


class LeaderDied(Exception):
    """A leader, while it was talked to."""


class Relay:
    """A worker's way to the recorder through its node; `token` tells runs apart. Safe to use from several threads."""

    def __init__(self, tell: Callable[[list[Call]], list[Any]], token: str, world: int) -> None:
        self._tell, self._world = tell, world
        self._folder = _relays_folder() / blake2b(f"{token} {socket.gethostname()}".encode(), digest_size=8).hexdigest()
        self._place = str(self._folder / "socket")
        self._leads: queue.SimpleQueue[tuple[Call, int, Future[Any]]] | None = None
        self._lock = threading.Lock()
        self._alone_until = 0.0

    def call(self, method: str, *arguments: Any) -> Any:
        """Has the recorder told, and gives its answer. Raises what the call raised, directly where no leader is found."""
        what: Call = (method, arguments)
        if time.monotonic() < self._alone_until:
            return self._tell([what])[0]
        for _ in range(TRIES):
            if self._leads is not None:
                return self._lead(what, os.getpid()).result()
            try:
                return self._follow(what)
            except (FileNotFoundError, ConnectionRefusedError):
                try:
                    began = self._begin_to_lead()
                except (OSError, SettingError) as error:
                    self._alone_until = math.inf
                    warnings.warn(f"each of this node's workers calls the recorder by itself: {error}", stacklevel=2)
                    break
                if not began:
                    time.sleep(0.05)
            except LeaderStandsStill:
                self._alone_until = time.monotonic() + ALONE_S
                break
            except LeaderDied:
                break
        return self._tell([what])[0]

    def _follow(self, what: Call) -> Any:
        """Says it through the leader. Raises what it was answered, and OSError, LeaderStandsStill or LeaderDied."""
        with Client(self._place, "AF_UNIX") as connection:
            if not _is_own(connection):
                raise LeaderDied
            try:
                connection.send((what, os.getpid()))
                if not connection.poll(ANSWER_S + self._world / CALLS_A_SECOND):
                    raise LeaderStandsStill
                answer, failed = connection.recv()
            except (OSError, EOFError):
                raise LeaderDied from None
        if failed:
            raise answer
        return answer

    def _begin_to_lead(self) -> bool:
        """Whether this process leads from here on, or did already: for as long as it lives it holds a lock."""
        with self._lock:
            if self._leads is not None:
                return True
            open_private(self._folder.parent)
            open_private(self._folder)
            lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            with suppress(FileNotFoundError):
                os.unlink(self._place)  # of one that died
            _clear(self._folder)
            listener = Listener(self._place, "AF_UNIX", backlog=128)
            self._leads = queue.SimpleQueue()
            atexit.register(self._end, listener)
            for target, argument in ((self._listen, listener), (self._deliver, self._leads)):
                threading.Thread(target=target, args=(argument,), name="relay", daemon=True).start()
            return True

    def _lead(self, what: Call, process: int) -> "Future[Any]":
        assert self._leads is not None
        future: Future[Any] = Future()
        self._leads.put((what, process, future))
        return future

    def _listen(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError):  # of a worker that went again, or at this process's end
                time.sleep(0.05)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="relay", daemon=True).start()

    def _end(self, listener: Listener) -> None:
        """Leaves nothing behind."""
        with suppress(OSError):
            listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, connection: Connection) -> None:
        """Takes a call of another worker, and answers it."""
        with suppress(OSError, EOFError), connection:
            if not _is_own(connection):  # before anything that it sends is unpickled
                return
            what, process = connection.recv()
            try:
                answer = self._lead(what, process).result(), False
            except Exception as error:
                answer = _portable(error), True
            connection.send(answer)

    def _deliver(self, waiting: "queue.SimpleQueue[tuple[Call, int, Future[Any]]]") -> None:
        """Makes one call of all that came since the last one."""
        workers = {os.getpid()}
        while True:
            batch = [waiting.get()]
            # As many nodes have as many workers as this one, as far as it knows.
            time.sleep(self._world / len(workers) / CALLS_A_SECOND)
            while not waiting.empty():
                batch.append(waiting.get())
            workers |= {process for _, process, _ in batch}
            try:
                answers = self._tell([what for what, _, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)


def _relays_folder() -> Path:
    """Returns where this user's sockets lie: not in `$RAYSTRIDE_CACHE`, which may be long, or a disk of the network."""
    temporary = tempfile.gettempdir()
    return Path(temporary if len(os.fsencode(temporary)) <= MAX_FOLDER else "/tmp") / f"raystride-{os.getuid()}-relays"  # noqa: S108


def _is_own(connection: Connection) -> bool:
    """Whether a process of the same user is at the other end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


def _clear(own: Path) -> None:
    """Removes what leaders of other runs have left that were killed: nobody holds their locks."""
    for other in own.parent.iterdir():
        with suppress(OSError):
            if other != own and time.time() - other.stat().st_mtime > YOUNG_S:
                with (other / "lock").open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other, ignore_errors=True)


def _portable(error: Exception) -> Exception:
    """An error that another process can be told."""
    try:
        pickle.dumps(error)
        copy.copy(error)
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
