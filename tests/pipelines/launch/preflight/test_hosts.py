"""What is found on hosts is told host by host; the real ones are in `tests/cluster`."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import DataConfig
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.launch.cluster.network import ClusterNode, Links, NoAnswer, measure_network, run_on_all_nodes
from raystride.pipelines.launch.preflight.checks import describe_failures
from raystride.pipelines.launch.preflight.hosts import HostProbe, HostReport, HostReports, probe_hosts
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.prover import NodeProof, ProofReport
from tests.tiny import tiny, write_text

ONE, TWO, THREE = (ClusterNode(f"10.0.0.{number}", f"h{number}") for number in (1, 2, 3))
NOW = time.time()
FINE = HostReport(free_gib=100.0, now=NOW, versions="Python 3.11")


def _found(*reports: HostReport | NoAnswer, unshared: frozenset[ClusterNode] = frozenset()) -> HostReports:
    return HostReports(Folder("/runs"), dict(zip((ONE, TWO, THREE), reports, strict=False)), unshared, (NOW - 1, NOW + 1))


def test_hosts_that_are_well_pass() -> None:
    hosts = _found(FINE, FINE, FINE)
    assert not list(describe_failures([*hosts.checks(), *hosts.optional_checks({ONE: Links("eth0"), TWO: Links("eth0")})]))


def test_each_host_that_is_not_well_is_named() -> None:
    hosts = _found(
        NoAnswer("no answer in 60 s"), replace(FINE, inputs="/data is missing"), FINE, unshared=frozenset([THREE])
    )
    silent, storage, data = describe_failures(hosts.checks())
    assert "h1 (10.0.0.1): no answer in 60 s" in silent
    assert "h3 (10.0.0.3): what it wrote is not seen by the driver" in storage
    assert "h2 (10.0.0.2): /data is missing" in data
    assert "h2" in hosts.table({})


@pytest.mark.parametrize(("ahead", "words"), [(3600.0, "+3,599 s"), (-3600.0, "-3,599 s"), (4.0, "")])
def test_a_clock_that_is_wrong_is_told_by_how_much_at_least(ahead: float, words: str) -> None:
    hosts = _found(FINE, replace(FINE, now=NOW + ahead))
    told = " ".join(describe_failures(hosts.optional_checks({})))
    assert (f"h2 (10.0.0.2): {words}" in told) == bool(words)
    assert bool(told) == bool(words)


def test_a_full_disk_a_closed_way_and_a_silent_name_server_are_told() -> None:
    hosts = _found(replace(FINE, free_gib=0.25, certificate_days=300.0), replace(FINE, certificate_days=29.4))
    links = {ONE: Links("docker0", ("h2: 10.0.0.2 timed out",)), TWO: Links("eth0", (), "h1", 11.0, lookup_s=10.01)}
    disk, network, certificate, names = describe_failures(hosts.optional_checks(links))
    assert "h2 (10.0.0.2): ends in 29 days" in certificate
    assert "h1 (10.0.0.1): 0.25 GiB free" in disk
    assert "h1 (10.0.0.1): h2: 10.0.0.2 timed out" in network
    assert "GLOO_SOCKET_IFNAME" in network
    assert "h2 (10.0.0.2): 10 s to look up an address" in names
    assert [line.split()[:3] for line in hosts.table(links).splitlines()[1:]] == [
        ["h1", "10.0.0.1", "docker0"],
        ["h2", "10.0.0.2", "eth0"],
    ]


def test_a_host_looks_at_what_it_has(tmp_path: Path) -> None:
    config, probe = tiny(write_text(tmp_path)), Folder(str(tmp_path / "probe"))
    look = HostProbe(config, probe, "another hash", PluginBundle())
    assert "is another folder" in look().storage
    probe.put("driver", "here")
    reports = look()
    assert (reports.storage, reports.inputs) == ("", "it has other files under the same names")
    assert "Python 3." in reports.versions
    assert abs(reports.now - time.time()) < 60
    gone = replace(look, config=tiny(tmp_path / "nowhere.txt"))()
    assert "nowhere.txt" in gone.inputs
    assert replace(look, data=None)().inputs == ""


@pytest.mark.parametrize("file", ["config.json", "config.yaml", ""])
def test_a_base_is_a_model_or_a_run(tmp_path: Path, file: str) -> None:
    config, probe = tiny(write_text(tmp_path)), Folder(str(tmp_path / "probe"))
    config = replace(config, model=replace(config.model, init_from=str(tmp_path)))
    if file:
        (tmp_path / file).write_text("")
    assert (HostProbe(config, probe, None, PluginBundle())().inputs == "") is bool(file)


def test_a_copy_is_as_good_as_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other times, and is the same file all the same; one of another size is not."""
    text, storage = write_text(tmp_path), Folder(str(tmp_path / "runs"))
    looks: list[HostProbe] = []

    def ask(look: HostProbe, timeout_s: float) -> dict[ClusterNode, HostReport]:
        looks.append(look)
        return {ONE: look()}

    monkeypatch.setattr("raystride.pipelines.launch.preflight.hosts.run_on_all_nodes", ask)
    assert not list(describe_failures(probe_hosts(RunContext(tiny(text), storage)).checks()))
    os.utime(text, (1, 1))
    assert not looks[0]().inputs
    text.write_text(text.read_text() + "more")
    assert looks[0]().inputs == "it has other files under the same names"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.long
def test_a_real_cluster_of_one_host_is_looked_at_and_nothing_is_left(tmp_path: Path) -> None:
    storage = Folder(str(tmp_path / "runs"))
    hosts = probe_hosts(RunContext(tiny(write_text(tmp_path)), storage))
    assert not list(describe_failures(hosts.checks()))
    assert storage.names() == []
    assert measure_network(60) == {}
    assert [isinstance(answer, NoAnswer) for answer in run_on_all_nodes(_raises, 60).values()] == [True]
    proof = NodeProof(tiny(write_text(tmp_path)), storage, 1.0)
    assert list(run_on_all_nodes(proof, 120).values()) == [ProofReport()], "a host without a GPU proves nothing"


def _raises() -> str:
    raise ValueError("nothing is here")


def test_sources_are_listed_unless_all_of_them_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, looks = Folder.from_uri(str(tmp_path / "runs")), list[HostProbe]()

    def ask(look: HostProbe, timeout_s: float) -> dict[ClusterNode, HostReport]:
        looks.append(look)
        return {ONE: look()}

    monkeypatch.setattr("raystride.pipelines.launch.preflight.hosts.run_on_all_nodes", ask)
    sources = {}
    for name in "ab":
        (tmp_path / name).mkdir()
        sources[name] = {"source": str(write_text(tmp_path / name)), "kind": "text"}
    config = replace(tiny(tmp_path), data=DataConfig(sources=sources, validation="tail", validation_fraction=0.1))
    task = build_task(config)
    prepare(RunContext(config, storage, log=lambda _: None), task, on_ray=False)
    probe_hosts(RunContext(config, storage))
    (storage / ".prepared" / identity(config, task).fingerprint_of_source("b")).remove("manifest.json")
    probe_hosts(RunContext(config, storage))
    assert [look.data is None for look in looks] == [True, False]
