"""Groups of processes over the interface that they are told, and what of them can be reached from elsewhere."""

import gc
import os
import shutil
import stat
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from raystride.pipelines.train.distributed import process_group as group
from raystride.pipelines.train.distributed.process_group import (
    GLOO_VARIABLE,
    LAZY_INIT_VARIABLE,
    NCCL_VARIABLE,
    RENDEZVOUS_VARIABLE,
    count_nodes,
    create_rendezvous_file,
    find_interface,
    join_group,
    leave_group,
    set_rendezvous_file,
    use_interface_with,
)
from tests.distributed import LIMIT_S, run_distributed
from tests.fork_server import CONTEXT

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GLOO_VARIABLE, LAZY_INIT_VARIABLE, NCCL_VARIABLE, RENDEZVOUS_VARIABLE):
        monkeypatch.setenv(name, "")  # to be undone, whatever the test sets
        monkeypatch.delenv(name)


def _elsewhere() -> tuple[str, str] | None:
    """An interface that is not loopback, and its address, if there is one."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET" and not each.address.startswith("127."):
                return name, each.address
    return None


def test_an_interface_is_found_by_its_address() -> None:
    assert find_interface(LOOPBACK) in ("lo", "lo0")
    assert find_interface("192.0.2.77") is None
    if found := _elsewhere():
        assert find_interface(found[1]) == found[0]


def test_a_user_s_own_interface_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_VARIABLE, "ib0")
    use_interface_with(LOOPBACK)
    assert os.environ[GLOO_VARIABLE] == "ib0"


def test_on_a_network_gloo_takes_the_node_s_interface_and_nccl_its_own_choice() -> None:
    use_interface_with("192.0.2.77")
    assert GLOO_VARIABLE not in os.environ
    name, address = _elsewhere() or ("lo", LOOPBACK)
    use_interface_with(address)
    assert os.environ[GLOO_VARIABLE] == name
    assert (NCCL_VARIABLE in os.environ) == (address == LOOPBACK)


def test_a_meeting_is_its_user_s_alone() -> None:
    file = Path(create_rendezvous_file())
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    set_rendezvous_file(str(file))
    assert os.environ[RENDEZVOUS_VARIABLE] == str(file)
    assert os.environ[GLOO_VARIABLE] == os.environ[NCCL_VARIABLE] == find_interface(LOOPBACK)
    set_rendezvous_file(None)
    assert RENDEZVOUS_VARIABLE not in os.environ
    shutil.rmtree(file.parent)


def test_no_destructor_reaches_for_a_file_that_another_worker_removes() -> None:
    """It would remove the file of a group of one."""
    file = create_rendezvous_file()
    store = group._create_file_store(file, world=1)
    store.set("key", "value")
    del store
    gc.collect()
    assert Path(file).exists()
    shutil.rmtree(Path(file).parent)


def _worker(rank: int, world: int, file: str | None, place: Path) -> None:
    """Sums over the group, and over another one as checkpoints have; writes down the sums and where it listens."""
    torch.set_num_threads(1)
    set_rendezvous_file(file)
    join_group("gloo", rank, world)
    found = torch.ones(3)
    dist.all_reduce(found)
    other = torch.ones(3)
    dist.all_reduce(other, group=dist.new_group(backend="gloo"))
    listening = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    (place / str(rank)).write_text(f"{found.sum() + other.sum():g} {','.join(sorted(listening))}")
    leave_group(rank)


@pytest.mark.parametrize("world", [1, 2])
def test_a_group_on_one_machine_listens_on_loopback_alone(world: int, tmp_path: Path) -> None:
    file = create_rendezvous_file() if world > 1 else None
    processes = [CONTEXT.Process(target=_worker, args=(rank, world, file, tmp_path)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    for rank in range(world):
        assert (tmp_path / str(rank)).read_text() in (f"{6 * world} {LOOPBACK}", f"{6 * world} " if world == 1 else "")
    if file:
        assert not Path(file).parent.exists()


def _connections(rank: int, world: int, file: str, most_meshed: int, place: Path) -> None:
    """Sums over two groups; writes down the sums and this process's connections after them."""
    group.MAX_EAGER_WORKERS = most_meshed
    torch.set_num_threads(1)
    set_rendezvous_file(file)
    join_group("gloo", rank, world)
    numbers = torch.arange(3.0) + rank
    dist.all_reduce(numbers)
    other = torch.tensor([float(rank)])
    second = dist.new_group(backend="gloo")
    dist.broadcast(other, src=world - 1, group=second)
    dist.barrier(group=second)
    made = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    dist.barrier(group=second)  # nobody ends before all have counted
    (place / str(rank)).write_text(f"{numbers.sum() + other.sum():g} {len(made)}")
    leave_group(rank)


@pytest.mark.parametrize("lazily", [False, True])
def test_a_group_of_many_connects_those_that_talk(lazily: bool, tmp_path: Path) -> None:
    world, file = 10, create_rendezvous_file()
    arguments = world, file, 4 if lazily else world, tmp_path
    processes = [CONTEXT.Process(target=_connections, args=(rank, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    tree_reduce_object = [(tmp_path / str(rank)).read_text().split() for rank in range(world)]
    assert {sums for sums, _ in tree_reduce_object} == {f"{3 * sum(range(world)) + 3 * world + world - 1:g}"}
    made = [int(count) for _, count in tree_reduce_object]
    if lazily:  # neighbours in a ring, and those at distances of powers of two
        assert max(made) < 2 * (world - 1)
    else:
        assert min(made) >= 2 * (world - 1)


def _count(rank: int, world: int, nodes: list[str]) -> int:
    return count_nodes(nodes[rank], world, torch.device("cpu"))


@pytest.mark.parametrize(("nodes", "count"), [(["a", "a", "b"], 2), (["a", "b", "c"], 3), (["a", "a"], 1)])
def test_machines_are_counted_where_they_have_unlike_numbers_of_workers(nodes: list[str], count: int) -> None:
    assert run_distributed(_count, len(nodes), nodes) == [count] * len(nodes)


def test_one_worker_is_on_one_machine_and_has_no_group() -> None:
    assert count_nodes("a", 1, torch.device("cpu")) == 1
