"""The process group of a run's workers, and the interfaces on which its processes listen.

Neither gloo nor PyTorch's store authenticates peers. Workers that are all on one machine rendezvous in a file that no other
user may open, and communicate over loopback. Workers on several machines use the interface with the address by which Ray
knows the machine: by default gloo takes that of the host's name, which is loopback on many machines, and PyTorch's TCPStore
listens on every interface, whatever host it is given, unless it receives a socket.

    use_interface_with("10.0.0.7"); set_rendezvous_file(None)   # before, in every worker; or the file that all of them share
    join_group("gloo", rank=0, world=2)                         # creates the group
    leave_group(rank=0)
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raystride.pipelines.train.distributed.connectivity import GLOO_VARIABLE, check_reachable

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"
RENDEZVOUS_VARIABLE = "RAYSTRIDE_MEETING"
"""The environment variable with the rendezvous file of workers on one machine."""
RENDEZVOUS_PREFIX, RENDEZVOUS_LOCK = "raystride-meeting-", "lock"
"""Names of the folder of a rendezvous file, and of the lock in it that its maker holds as long as it lives."""
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""The variable with NCCL's interface, as GLOO_VARIABLE with gloo's; a user's own value is kept."""
TIMEOUT = timedelta(minutes=30)
MAX_EAGER_WORKERS = 64
"""Number of workers up to which gloo connects all pairs beforehand, so that unreachable ones are known at the start."""
LAZY_INIT_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""The variable that makes gloo connect two workers at their first message: few pairs in a ring or a tree, one address
each."""


def find_interface(address: str) -> str | None:
    """Returns the name of this machine's interface with an IP address; None if there is none, or it cannot be found out."""
    try:
        import psutil
    except ImportError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return None


def use_interface_with(address: str) -> None:
    """Makes this process's groups use the interface with this address, unless the user has set another."""
    name = find_interface(address)
    if name is None:
        return
    os.environ.setdefault(GLOO_VARIABLE, name)
    if address == LOOPBACK:  # over a network NCCL itself chooses the fast interfaces better
        os.environ.setdefault(NCCL_VARIABLE, name)


def create_rendezvous_file() -> str:
    """Returns the path of a rendezvous file for workers of this machine, in a folder private to its user."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=RENDEZVOUS_PREFIX))
        with suppress(OSError):  # `remove_abandoned_rendezvous` came between the two, or the drive has no locks
            lock = (folder / RENDEZVOUS_LOCK).open("wb")
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / RENDEZVOUS_LOCK).exists():
                _rendezvous_locks[str(folder / "store")] = lock
                return str(folder / "store")
            lock.close()


_rendezvous_locks: dict[str, IO[bytes]] = {}
"""Locks that this process holds until its end, by the rendezvous file."""


def list_abandoned_rendezvous() -> list[Path]:
    """Returns the rendezvous folders of this user in the temporary folder whose maker has died.

    Versions before 0.4 made them without a lock, so nothing says whether theirs are in use.
    """
    return [folder for folder in Path(tempfile.gettempdir()).glob(f"{RENDEZVOUS_PREFIX}*") if _with_its_lock(folder)]


def remove_abandoned_rendezvous(folder: Path) -> bool:
    """Removes a rendezvous folder if its maker has died; returns whether it did."""
    return _with_its_lock(folder, remove=True)


def _with_its_lock(folder: Path, *, remove: bool = False) -> bool:
    """Returns whether nobody holds the lock of a rendezvous folder; removes it under that lock if asked."""
    try:
        with (folder / RENDEZVOUS_LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove:
                shutil.rmtree(folder, ignore_errors=True)
            return True
    except OSError:  # it is held, another user's, or has none
        return False


def set_rendezvous_file(file: str | None) -> None:
    """Makes this process's group rendezvous in a file and use loopback; None: at MASTER_ADDR."""
    if file is None:
        os.environ.pop(RENDEZVOUS_VARIABLE, None)
        return
    os.environ[RENDEZVOUS_VARIABLE] = file
    use_interface_with(LOOPBACK)


def join_group(backend: str, rank: int, world: int) -> None:
    """Creates the run's process group in this process. One worker alone needs no rendezvous.

    Raises Unreachable if workers on several machines cannot connect over gloo's interfaces.
    """
    import torch.distributed as dist

    os.environ[LAZY_INIT_VARIABLE] = str(
        int(world > MAX_EAGER_WORKERS)
    )  # also for groups created later; it must be equal on all workers
    store: Any
    if world == 1:
        use_interface_with(LOOPBACK)
        store = dist.HashStore()  # type: ignore[attr-defined]
    elif file := os.environ.get(RENDEZVOUS_VARIABLE):
        store = _create_file_store(file, world)
    else:
        store = _create_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world)
        check_reachable(store, rank, world, timeout=TIMEOUT)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT, store=store)


def _create_file_store(file: str, world: int) -> Any:
    """Creates the store of a group on one machine, which lasts as long as this process.

    Its destructor opens the file twice, and ends the process by SIGABRT if rank 0 removes the folder between the two.
    """
    import torch.distributed as dist

    store = dist.FileStore(file, world)  # type: ignore[attr-defined]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def _create_store(address: str, port: int, rank: int, world: int) -> Any:
    """Creates the store of a group on several machines, at the first one's address. Raises OSError if the port is taken."""
    import torch.distributed as dist

    socket_of_first = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The store closes it at its end.
        socket_of_first = socket.create_server((address, port), family=family, backlog=world).detach()
    return dist.TCPStore(address, port, world, rank == 0, TIMEOUT, master_listen_fd=socket_of_first)  # type: ignore[attr-defined]


def leave_group(rank: int) -> None:
    """Ends the process group's threads while the interpreter still runs.

    A gloo thread releases the tensors of its last collective at some later time, and needs Python's lock for it. If Python
    is ending by then, the thread is unwound through C++ that forbids it, and the process aborts ("terminate called without
    an active exception"): 9 of 360 processes without this, none of 1,000 with it. Only after a success: after a failure the
    group may wait for a lost peer, for as long as its timeout.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    if rank == 0 and (file := os.environ.get(RENDEZVOUS_VARIABLE)):
        shutil.rmtree(Path(file).parent, ignore_errors=True)
        if lock := _rendezvous_locks.pop(file, None):
            lock.close()


def count_nodes(node: str, world: int, device: "torch.device") -> int:
    """Counts the machines of the group's workers, by their names; all workers call it together."""
    if world == 1:
        return 1
    import torch
    import torch.distributed as dist

    own = torch.tensor([int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "big")], device=device)
    names = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(names, own)
    return len(set(torch.cat(names).tolist()))
