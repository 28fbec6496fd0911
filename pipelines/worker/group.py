"""The process group of a run's workers, and where its processes listen.

Neither gloo nor PyTorch's store asks anyone who he is. Workers that are all on one machine meet in a file that nobody else
may open, and talk over loopback. Workers on several machines talk over the interface that carries the address by which Ray
knows the machine: by itself gloo takes that of the host's name, which is loopback on many machines, and PyTorch's TCPStore
listens on every interface, whatever host it is given, unless it is handed a socket.

    use_interface_of("10.0.0.7"); meet_in(None)               # before, in every worker; or the file that all of them share
    join_group("gloo", rank=0, world=2)                       # makes the group
    leave_group(rank=0)
"""

import hashlib
import os
import shutil
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.worker.reachable import GLOO, prove_reachable

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"
MEETING = "RAYSTRIDE_MEETING"
"""The file in which the workers of one machine meet, in their environment."""
NCCL = "NCCL_SOCKET_IFNAME"
"""What NCCL takes as the interface to talk over, as GLOO is what gloo takes; a user's own words stand."""
LIMIT = timedelta(minutes=30)
MOST_MESHED = 64
"""Workers up to which gloo connects each with each beforehand, so that whoever cannot be reached is known at the start."""
LAZY = "TORCH_GLOO_LAZY_INIT"
"""What has gloo connect two workers when they first talk: of a ring or a tree these are few, and each tells one address."""


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with an IP address; None where there is none, or it cannot be found out."""
    try:
        import psutil
    except ImportError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None


def use_interface_of(address: str) -> None:
    """Has this process's groups talk over the interface with this address, unless the user has named another."""
    name = interface_of(address)
    if name is None:
        return
    os.environ.setdefault(GLOO, name)
    if address == LOOPBACK:  # over a network NCCL knows better which of several are fast
        os.environ.setdefault(NCCL, name)


def new_meeting() -> str:
    """A file in which workers of this machine can meet, in a folder that is its user's alone."""
    return str(Path(tempfile.mkdtemp(prefix="raystride-meeting-")) / "store")


def meet_in(file: str | None) -> None:
    """Has this process's group meet in a file and talk over loopback; None: where MASTER_ADDR says."""
    if file is None:
        os.environ.pop(MEETING, None)
        return
    os.environ[MEETING] = file
    use_interface_of(LOOPBACK)


def join_group(backend: str, rank: int, world: int) -> None:
    """Makes this process part of its run's group. One worker alone needs no one to meet.

    Raises Unreachable where workers on several machines cannot talk over the interfaces that gloo takes.
    """
    import torch.distributed as dist

    os.environ[LAZY] = str(int(world > MOST_MESHED))  # of the groups that are made later, too; all workers must do alike
    store: Any
    if world == 1:
        use_interface_of(LOOPBACK)
        store = dist.HashStore()  # type: ignore[attr-defined]
    elif file := os.environ.get(MEETING):
        store = dist.FileStore(file, world)  # type: ignore[attr-defined]
    else:
        store = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world)
        prove_reachable(store, rank, world, waits=LIMIT)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=LIMIT, store=store)


def _store(address: str, port: int, rank: int, world: int) -> Any:
    """The store of a group on several machines, at the first's address alone. Raises OSError where the port is taken."""
    import torch.distributed as dist

    socket_of_first = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The store closes it, at its end.
        socket_of_first = socket.create_server((address, port), family=family, backlog=world).detach()
    return dist.TCPStore(address, port, world, rank == 0, LIMIT, master_listen_fd=socket_of_first)  # type: ignore[attr-defined]


def leave_group(rank: int) -> None:
    """Ends the process group's threads while the interpreter still runs.

    A gloo thread releases the tensors of its last collective when it gets to it, for which it needs Python's lock. Where
    Python is ending by then, the thread is unwound through C++ that forbids it, and the process aborts ("terminate called
    without an active exception"): 9 of 360 processes without this, none of 1,000 with it. Only after a success: after a
    failure the group may wait for a lost peer, for as long as its timeout.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    if rank == 0 and (file := os.environ.get(MEETING)):
        shutil.rmtree(Path(file).parent, ignore_errors=True)


def count_nodes(node: str, world: int, device: "torch.device") -> int:
    """On how many machines the group's workers are, by the name that each gives its own; all of them call it together."""
    if world == 1:
        return 1
    import torch
    import torch.distributed as dist

    own = torch.tensor([int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "big")], device=device)
    names = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(names, own)
    return len(set(torch.cat(names).tolist()))
