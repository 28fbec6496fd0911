"""Checks every host of a cluster before a training: storage, data, clock, disk, network.

    hosts = probe_hosts(RunContext(config, storage))
    hosts.checks()                                            # required: part of a training's preflight
    links = measure_network(60)                               # takes seconds, so for `raystride check` only
    [*hosts.optional_checks(links)], hosts.table(links)       # clocks, disks, network; and a line a host

All hosts are probed at once, each by a Ray task.
"""

import platform
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from raystride.locations import __version__
from raystride.pipelines.config import Config
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.prepare.fingerprint import hash_inputs
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.cluster.network import ClusterNode, Links, NoAnswer, run_on_all_nodes
from raystride.pipelines.launch.preflight.checks import GIB, Check
from raystride.pipelines.system.hub import is_hub_name, read_description
from raystride.pipelines.system.node_folder import node_folder
from raystride.pipelines.system.storage.folder import Folder

MIN_FREE_GIB = 1.0
"""Smallest free space of the disk of a host's shard cache."""
MAX_CLOCK_OFFSET_S = 5.0
"""Largest tolerated clock offset: leases are renewed far more rarely."""
MIN_CERTIFICATE_DAYS = 30
MAX_LOOKUP_S = 2.0
"""Longest tolerated address lookup: with an unresponsive server every worker waits 10 s at its start."""


@dataclass(frozen=True)
class HostReport:
    """Findings of the probe on a host."""

    storage: str = ""
    """Problem with the storage, or empty."""
    mark: str = ""
    """Name of the file that the probe has written there."""
    inputs: str = ""
    """Problem with data, tokenizer or weights; empty if they can be read or are prepared already."""
    free_gib: float = 0.0
    """Free space on the disk of the shard cache."""
    now: float = 0.0
    """Time of its clock, in seconds since 1970."""
    versions: str = ""
    """Versions of Python, Ray, PyTorch and Raystride."""
    certificate_days: float | None = None
    """Days until the certificate of its Ray expires; None without TLS, or if the file cannot be read."""


@dataclass(frozen=True)
class HostProbe:
    """Function object that probes the host of the calling process; pickled to the host."""

    config: Config
    probe: Folder
    """A folder in the storage for files of the driver and each host."""
    data: str | None
    """Hash of the driver's input files; None if hosts need none, as the data is prepared or on a hub."""
    plugin_bundle: PluginBundle

    def __call__(self) -> HostReport:
        from raystride.pipelines.launch.cluster.certificates import days_left  # slow import

        mark = uuid.uuid4().hex
        return HostReport(
            storage=self._check_storage(mark),
            mark=mark,
            inputs=self._check_inputs(),
            free_gib=_free_disk_gib(),
            now=time.time(),
            versions=_describe_versions(),
            certificate_days=days_left(),
        )

    def _check_storage(self, mark: str) -> str:
        """Reads the driver's file and writes one of its own; returns the problem or ""."""
        try:
            if not self.probe.exists("driver"):
                return f"what the driver wrote to {self.probe.parent} is not there: it is another folder"
            self.probe.put(mark, platform.node())
        except Exception as error:  # the error types depend on the file system's library
            return f"{type(error).__name__}: {error}"
        return ""

    def _check_inputs(self) -> str:
        models = {"model.init_from": self.config.model.init_from, "objective.teacher": self.config.objective.teacher}
        try:
            for setting, weights in models.items():
                if weights and is_hub_name(weights):
                    read_description(weights)
                elif weights and not any(Folder(weights).exists(name) for name in ("config.json", "config.yaml")):
                    return f"{setting} is {weights!r}: there is no config.json in it"
            if self.data is None:
                return ""
            self.plugin_bundle.register()
            found = hash_inputs(self.config, self.config.by_source())
        except Exception as error:  # SettingError, DataError, and errors of plug-ins and file systems
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return "" if found == self.data else "it has other files under the same names"


def _free_disk_gib() -> float:
    """Returns the free space of the disk of `node_folder`, existing or not."""
    folder = node_folder()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / GIB


def _describe_versions() -> str:
    found = [f"Python {platform.python_version()}", f"raystride {__version__}"]
    for package in ("ray", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


@dataclass(frozen=True)
class HostReports:
    """Reports of all hosts of a cluster."""

    storage: Folder
    reports: Mapping[ClusterNode, HostReport | NoAnswer]
    unshared: frozenset[ClusterNode]
    """Hosts that have written files to the storage that the driver does not see."""
    asked: tuple[float, float]
    """Begin and end of the probe, in seconds since 1970 by the driver's clock."""

    @property
    def answering_hosts(self) -> dict[ClusterNode, HostReport]:
        """The reports of hosts that have answered."""
        return {node: found for node, found in self.reports.items() if isinstance(found, HostReport)}

    def checks(self) -> list[Check]:
        """Checks that every host answers, shares the storage and can read the inputs; names each host that does not."""
        silent = {node: found.reason for node, found in self.reports.items() if isinstance(found, NoAnswer)}
        unwritable = {node: found.storage for node, found in self.answering_hosts.items() if found.storage}
        unwritable |= dict.fromkeys(self.unshared, "what it wrote is not seen by the driver")
        inputs = {node: found.inputs for node, found in self.answering_hosts.items() if found.inputs}
        return [
            _make_check("hosts", silent, f"{len(self.reports)} answer", "see `ray status`; raise launch.cluster_timeout_s"),
            _make_check(
                "hosts' storage",
                unwritable,
                f"all write to {self.storage}",
                "give --storage a folder or URI that every host can write, such as a network drive or an object store",
            ),
            _make_check(
                "hosts' data",
                inputs,
                "all read what the driver reads",
                "copy it to the same path on every host, or name a place that all reach, such as s3://bucket/folder",
            ),
        ]

    def optional_checks(self, links: Mapping[ClusterNode, Links | NoAnswer]) -> list[Check]:
        """Checks clocks, disks, network, certificates and name lookup of all hosts."""
        clocks = {node: _clock_offset_s(found.now, self.asked) for node, found in self.answering_hosts.items()}
        wrong = {node: f"{offset_s:+,.0f} s" for node, offset_s in clocks.items() if abs(offset_s) > MAX_CLOCK_OFFSET_S}
        free = {node: found.free_gib for node, found in self.answering_hosts.items()}
        full = {node: f"{gib:.2f} GiB free" for node, gib in free.items() if gib < MIN_FREE_GIB}
        disconnected = {node: found.reason for node, found in links.items() if isinstance(found, NoAnswer)}
        disconnected |= {node: "; ".join(entry.unreachable) for node, entry in links.items() if isinstance(entry, Links)}
        days_by_node = {
            node: found.certificate_days
            for node, found in self.answering_hosts.items()
            if found.certificate_days is not None
        }
        expiring = {
            node: f"ends in {max(days, 0):.0f} days" for node, days in days_by_node.items() if days < MIN_CERTIFICATE_DAYS
        }
        slow = {
            node: entry.lookup_s
            for node, entry in links.items()
            if isinstance(entry, Links) and entry.lookup_s > MAX_LOOKUP_S
        }
        return [
            _make_check(
                "clocks",
                wrong,
                f"none is off by {MAX_CLOCK_OFFSET_S:g} s",
                "have the hosts keep time, by chrony for instance",
            ),
            _make_check(
                "disks",
                full,
                f"{min(free.values(), default=0):.1f} GiB free at least",
                "free space, or name another place for copies of shards by $RAYSTRIDE_CACHE before `ray start`",
            ),
            _make_check(
                "network",
                {node: reason for node, reason in disconnected.items() if reason},
                "each reaches each other" if links else "one host",
                "open the ports between the hosts; where an interface is not the one that they share, set "
                "GLOO_SOCKET_IFNAME to that one's name before `ray start`",
            ),
            _make_check(
                "certificates",
                expiring,
                f"{min(days_by_node.values()):.0f} days left at least" if days_by_node else "none is used",
                "run `raystride certificates` for these hosts again, copy what it says, and start Ray again there",
            ),
            _make_check(
                "names",
                {node: f"{seconds:.0f} s to look up an address, at each start" for node, seconds in slow.items()},
                f"addresses are looked up within {MAX_LOOKUP_S:g} s",
                "have the name server in /etc/resolv.conf answer, or list all hosts in /etc/hosts",
            ),
        ]

    def table(self, links: Mapping[ClusterNode, Links | NoAnswer]) -> str:
        """Returns a table with a line a host: address, interface, free disk, send rate and its target, versions."""
        rows = [("host", "address", "interface", "free GiB", "sends MiB/s", "to", "versions")]
        for node, found in self.reports.items():
            link = links.get(node)
            sent = ("", "", "")
            if isinstance(link, Links):
                sent = (link.interface, f"{link.mib_per_s:.0f}" if link.mib_per_s else "", link.target)
            free, description = (
                ("", found.reason) if isinstance(found, NoAnswer) else (f"{found.free_gib:.1f}", found.versions)
            )
            rows.append((node.name, node.address, sent[0], free, *sent[1:], description))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def probe_hosts(context: RunContext) -> HostReports:
    """Probes every host of the cluster that this process has joined.

    Raises SettingError and DataError if this process cannot read the data itself.
    """
    config, storage = context.config, context.storage
    plugin_bundle = PluginBundle.collect(config)
    plugin_bundle.register()
    task, data_identity = context.task, context.identity()
    missing = [
        name
        for name in config.by_source()
        if not task.reads_dataset  # whose workers get their data from the driver, or open it themselves
        and load_finished_manifest(storage / ".prepared" / data_identity.fingerprint_of_source(name)) is None
    ]
    listed = hash_inputs(config, missing)
    probe = storage / f".probe-{uuid.uuid4().hex[:8]}"
    probe.put("driver", "here")
    try:
        host_probe, began = HostProbe(config, probe, listed, plugin_bundle if listed else PluginBundle()), time.time()
        reports = run_on_all_nodes(host_probe, config.launch.cluster_timeout_s)
        asked, files_left = (began, time.time()), set(probe.names())
    finally:
        with suppress(OSError):  # files of hosts that write as other users may stay
            probe.remove()
    markers = {node: found.mark for node, found in reports.items() if isinstance(found, HostReport) and not found.storage}
    return HostReports(storage, reports, frozenset(node for node, mark in markers.items() if mark not in files_left), asked)


def _clock_offset_s(now: float, asked: tuple[float, float]) -> float:
    """Returns the least offset of a clock in seconds, negative if behind; it was read within the `asked` interval."""
    began, ended = asked
    return now - began if now < began else max(0.0, now - ended)


def _make_check(name: str, problems: Mapping[ClusterNode, str], ok_text: str, remedy: str) -> Check:
    found = "; ".join(f"{node.name} ({node.address}): {reason}" for node, reason in problems.items())
    return Check(name, not problems, found or ok_text, remedy)
