"""How so many workers meet, for `benchmarks.scale`: PyTorch's real store, and two processes with a connection for each rank.

What each rank asks of the store is what gloo asks: its own address told, and those read that it connects to.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.scale_rows import Row

ADDRESS = b"a" * 154
"""As long as what gloo tells of a rank that connects when it is first talked to."""
SPEAKERS = 64
"""Threads of a process that connect."""


def join_store(port: int, ranks: list[int], world: int, peers: int, told: Any, begin: Any, end: Any) -> None:
    """Connects for some ranks, tells each one's address, waits for all, and reads those of its `peers`."""
    import torch.distributed as dist

    def connect(_: int) -> Any:
        return dist.TCPStore("127.0.0.1", port, world, False, wait_for_workers=False)

    # Each client asks the name service who it is, for seconds where that does not answer: all at once, as real ones do.
    with ThreadPoolExecutor(SPEAKERS) as pool:
        stores = dict(zip(ranks, pool.map(connect, ranks), strict=True))
    told.put("connected")
    begin.wait()
    for rank, store in stores.items():
        store.set(f"gloo/{rank}", ADDRESS.decode())
    for rank, store in stores.items():
        for step in range(peers):
            store.wait([f"gloo/{(rank + 1 + step) % world}"])
            store.get(f"gloo/{(rank + 1 + step) % world}")
    told.put("met")
    end.wait()


def rendezvous_rows(ranks: int) -> Iterator[Row]:
    """The store's process while all ranks meet, each of which then talks to a few others."""
    import psutil
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = socket.create_server(("127.0.0.1", port), backlog=ranks)
    store = dist.TCPStore("127.0.0.1", port, ranks, True, wait_for_workers=False, master_listen_fd=listening.detach())
    peers = 2 * max(1, (ranks - 1).bit_length())
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    context = multiprocessing.get_context("spawn")
    told, begin, end = context.Queue(), context.Event(), context.Event()
    arguments = ranks, peers, told, begin, end
    speakers = [
        context.Process(target=join_store, args=(port, list(range(half, ranks, 2)), *arguments)) for half in range(2)
    ]
    for each in speakers:
        each.start()
    this, before = psutil.Process(), 0.0
    for said in [told.get() for _ in speakers]:
        assert said == "connected"
    files, before, began = this.num_fds(), sum(this.cpu_times()[:2]), time.perf_counter()
    begin.set()
    for said in [told.get() for _ in speakers]:
        assert said == "met"
    seconds, used = time.perf_counter() - began, sum(this.cpu_times()[:2]) - before
    end.set()
    for each in speakers:
        each.join()
    del store
    note = f"{peers} peers a rank, {files} files open at the store; {seconds:.1f} s in all"
    yield Row("rendezvous, PyTorch's store", ranks, seconds=used, bytes=ranks * peers * len(ADDRESS), note=note)
