"""Workers that cannot talk to each other are named to all of them, and those that can go on."""

import os
import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from raystride.pipelines.deploy.own_ray import free_ports
from raystride.pipelines.worker.reachable import GLOO, PLACE, Unreachable, prove_reachable
from tests.distributed import run_distributed


def _told(rank: int, world: int, interfaces: list[str], port: int) -> str:
    """What a worker that takes this interface is told; empty: nothing is wrong."""
    os.environ[GLOO] = interfaces[rank]
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    try:
        prove_reachable(store, rank, world)
    except Unreachable as problem:
        return str(problem)
    finally:
        dist.barrier()  # the store is the first worker's
    return ""


@pytest.mark.parametrize("world", [2, 3])
def test_workers_that_can_talk_are_told_nothing(world: int) -> None:
    assert run_distributed(_told, world, ["lo"] * world, *free_ports(1)) == [""] * world


def test_an_interface_that_is_not_there_is_named_to_all() -> None:
    said = run_distributed(_told, 2, ["lo", "nonesuch0"], *free_ports(1))
    assert said[0] == said[1]
    assert "worker 1" in said[0]
    assert "GLOO_SOCKET_IFNAME is 'nonesuch0'" in said[0]
    assert "lo" in said[0].partition("interfaces with an address are")[2]


def test_one_that_cannot_be_reached_is_named_with_its_machine_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker's address is that of a network which is for documentation alone (RFC 5737)."""
    monkeypatch.setattr("raystride.pipelines.worker.reachable.CONNECT_S", 0.5)
    monkeypatch.setenv(GLOO, "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set(f"{PLACE}/at/1", "192.0.2.1 9 eth7 elsewhere")
    with pytest.raises(Unreachable, match=r"cannot reach worker 1 on elsewhere \(eth7, 192\.0\.2\.1\).*GLOO_SOCKET_IFNAME"):
        prove_reachable(store, 0, 2)
    with pytest.raises(Unreachable, match="cannot reach worker 1 on elsewhere"):  # and so does everybody else
        prove_reachable(store, 3, 5)


def test_one_that_starts_late_is_waited_for_and_one_that_never_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "lo")
    assert "lo" in psutil.net_if_addrs()
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match=r"not all workers came within 0\.2 s"):
        prove_reachable(store, 0, 2, waits=timedelta(seconds=0.2))
    store = dist.HashStore()  # type: ignore[attr-defined]
    first = threading.Thread(target=prove_reachable, args=(store, 0, 2), daemon=True)
    first.start()
    prove_reachable(store, 1, 2)
    first.join(10)
    assert not first.is_alive()
