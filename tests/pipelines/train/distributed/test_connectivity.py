"""Workers that cannot talk to each other are named to all of them, and those that can go on."""

import os
import threading
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from raystride.pipelines.train.distributed.connectivity import GLOO_VARIABLE, KEY_PREFIX, Unreachable, check_reachable
from tests.distributed import run_distributed
from tests.ports import hold_port


def _reported_problem(rank: int, world: int, interfaces: list[str], port: int) -> str:
    """Returns the problem reported to a worker with this interface; "" if nothing is wrong."""
    os.environ[GLOO_VARIABLE] = interfaces[rank]
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    try:
        check_reachable(store, rank, world)
    except Unreachable as problem:
        return str(problem)
    finally:
        dist.barrier()  # the store is the first worker's
    return ""


@pytest.mark.parametrize("world", [2, 3])
def test_workers_that_can_talk_are_told_nothing(world: int) -> None:
    with hold_port() as port:
        assert run_distributed(_reported_problem, world, ["lo"] * world, port) == [""] * world


def test_an_interface_that_is_not_there_is_named_to_all() -> None:
    with hold_port() as port:
        said = run_distributed(_reported_problem, 2, ["lo", "nonesuch0"], port)
    assert said[0] == said[1]
    assert "worker 1" in said[0]
    assert "GLOO_SOCKET_IFNAME is 'nonesuch0'" in said[0]
    assert "lo" in said[0].partition("interfaces with an address are")[2]


def test_one_that_cannot_be_reached_is_named_with_its_machine_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker's address is that of a network which is for documentation alone (RFC 5737)."""
    monkeypatch.setattr("raystride.pipelines.train.distributed.connectivity.CONNECT_S", 0.5)
    monkeypatch.setenv(GLOO_VARIABLE, "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set(f"{KEY_PREFIX}/at/1", "192.0.2.1 9 eth7 elsewhere")
    with pytest.raises(Unreachable, match=r"cannot reach worker 1 on elsewhere \(eth7, 192\.0\.2\.1\).*GLOO_SOCKET_IFNAME"):
        check_reachable(store, 0, 2)
    with pytest.raises(Unreachable, match="cannot reach worker 1 on elsewhere"):  # and so does everybody else
        check_reachable(store, 3, 5)


def test_one_that_starts_late_is_waited_for_and_one_that_never_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_VARIABLE, "lo")
    assert "lo" in psutil.net_if_addrs()
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match=r"not all workers came within 0\.2 s"):
        check_reachable(store, 0, 2, timeout=timedelta(seconds=0.2))
    store = dist.HashStore()  # type: ignore[attr-defined]
    first = threading.Thread(target=check_reachable, args=(store, 0, 2), daemon=True)
    first.start()
    check_reachable(store, 1, 2)
    first.join(10)
    assert not first.is_alive()
