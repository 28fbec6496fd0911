"""What every host of a cluster is looked at for before anything starts there: storage, data, clock, disk, network.

    hosts = look_at_hosts(config, storage)
    hosts.checks()                                            # what a training cannot do without: its preflight has them
    links = measure_network(60)                               # some seconds, so for `raystride check` alone
    [*hosts.more_checks(links)], hosts.table(links)           # clocks, disks, ways; and a line a host

All hosts are asked at once, each in a process of Ray's there.
"""

import hashlib
import json
import platform
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from raystride import __version__
from raystride.pipelines.cluster.nodes import ClusterNode, Links, NoAnswer, ask_each_node
from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import is_hub_name, read_description
from raystride.pipelines.launch.preflight import GIB, Check
from raystride.pipelines.node_folder import node_folder
from raystride.pipelines.plugins import Carried
from raystride.pipelines.prepare.fingerprint import NOTHING_KEPT, Kept, identity, open_sources
from raystride.pipelines.prepare.one_source import finished
from raystride.pipelines.sources.source import Source
from raystride.pipelines.tasks import build_task

LEAST_FREE_GIB = 1.0
"""Of the disk on which a host keeps copies of shards."""
CLOCK_S = 5.0
"""A clock may be off by so much: leases are renewed far more rarely."""
MIN_CERTIFICATE_DAYS = 30
LOOKUP_S = 2.0
"""To look up an address may take so long: a server that does not answer is waited for 10 s, by every worker at its start."""


@dataclass(frozen=True)
class HostSeen:
    """What was found on a host."""

    storage: str = ""
    """Why the storage does not do; empty: it does."""
    mark: str = ""
    """The name of the file that it has left there."""
    inputs: str = ""
    """Why data, tokenizer or weights do not; empty: they do, or are prepared already."""
    free_gib: float = 0.0
    """Free where copies of shards are kept."""
    now: float = 0.0
    """What its clock shows, in seconds since 1970."""
    versions: str = ""
    """Of Python, Ray, PyTorch and Raystride."""
    certificate_days: float | None = None
    """Days until the certificate ends by which its Ray talks TLS; None: it talks without, or the file cannot be read."""


@dataclass(frozen=True)
class LookAtHost:
    """Looks at the host that it is called on; travels there by value."""

    config: Config
    probe: Folder
    """A folder in the storage, into which the driver has written, and each host writes."""
    data: str | None
    """What the driver's files hash to; None: they are prepared, or lie on a hub, and no host needs its own."""
    carried: Carried

    def __call__(self) -> HostSeen:
        from raystride.pipelines.cluster.certificates import days_left  # and what it is read with, which takes a while

        mark = uuid.uuid4().hex
        return HostSeen(
            storage=self._storage(mark),
            mark=mark,
            inputs=self._inputs(),
            free_gib=_free_gib(),
            now=time.time(),
            versions=_versions(),
            certificate_days=days_left(),
        )

    def _storage(self, mark: str) -> str:
        """Reads what the driver has written, and leaves a file of its own."""
        try:
            if not self.probe.exists("driver"):
                return f"what the driver wrote to {self.probe.parent} is not there: it is another folder"
            self.probe.put(mark, platform.node())
        except Exception as error:  # what a file system raises depends on its library
            return f"{type(error).__name__}: {error}"
        return ""

    def _inputs(self) -> str:
        weights = self.config.model.init_from
        try:
            if weights and is_hub_name(weights):
                read_description(weights)
            elif weights and not any(Folder(weights).exists(name) for name in ("config.json", "config.yaml")):
                return f"model.init_from is {weights!r}: there is no config.json in it"
            if self.data is None:
                return ""
            self.carried.register()
            found = _listed(self.config, list(_sources(self.config).values()))
        except Exception as error:  # SettingError, DataError, and what a plug-in or a file system raises
            return str(error).splitlines()[0] if str(error) else type(error).__name__
        return "" if found == self.data else "it has other files under the same names"


Opened = tuple[Source, Source | None]
"""A source, and the one that validates, where there is one."""


def _sources(config: Config) -> dict[str, Opened]:
    """The sources by name, "" where there is but one. Raises DataError, SettingError."""
    return {name: open_sources(own, build_task(own)) for name, own in config.by_source().items()}


def _listed(config: Config, sources: Sequence[Opened]) -> str:
    """A hash of names and sizes of the files, and of the tokenizer's content. Not of their times, which copies have anew.

    Raises DataError and SettingError where something is not there.
    """
    from raystride.pipelines.tokenizers.training import read_file

    files = [[each.name, each.size] for opened in sources for some in opened if some for each in some.files]
    tokenizer = read_file(config.tokenizer) if config.tokenizer.kind == "file" else ""
    return hashlib.sha256(json.dumps([files, tokenizer]).encode()).hexdigest()


def _free_gib() -> float:
    """Of the disk that `node_folder` is on, which need not be there yet."""
    place = node_folder()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free / GIB


def _versions() -> str:
    found = [f"Python {platform.python_version()}", f"raystride {__version__}"]
    for package in ("ray", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


@dataclass(frozen=True)
class HostsSeen:
    """All hosts of a cluster, as they were found."""

    storage: Folder
    seen: Mapping[ClusterNode, HostSeen | NoAnswer]
    unshared: frozenset[ClusterNode]
    """Hosts that have written to the storage what the driver does not see there."""
    asked: tuple[float, float]
    """From when to when, in seconds since 1970 by the driver's clock."""

    @property
    def answered(self) -> dict[ClusterNode, HostSeen]:
        """The hosts that have answered."""
        return {node: found for node, found in self.seen.items() if isinstance(found, HostSeen)}

    def checks(self) -> list[Check]:
        """Whether every host answers, shares the storage and can read what is to be read; each that does not is named."""
        silent = {node: found.why for node, found in self.seen.items() if isinstance(found, NoAnswer)}
        without = {node: found.storage for node, found in self.answered.items() if found.storage}
        without |= dict.fromkeys(self.unshared, "what it wrote is not seen by the driver")
        inputs = {node: found.inputs for node, found in self.answered.items() if found.inputs}
        return [
            _check("hosts", silent, f"{len(self.seen)} answer", "see `ray status`, or raise launch.timeout_s"),
            _check(
                "hosts' storage",
                without,
                f"all write to {self.storage}",
                "give --storage a folder or URI that every host can write, such as a network drive or an object store",
            ),
            _check(
                "hosts' data",
                inputs,
                "all read what the driver reads",
                "copy it to the same path on every host, or name a place that all reach, such as s3://bucket/folder",
            ),
        ]

    def more_checks(self, links: Mapping[ClusterNode, Links | NoAnswer]) -> list[Check]:
        """Whether clocks are right, disks have room, and all hosts reach each other."""
        clocks = {node: _off(found.now, self.asked) for node, found in self.answered.items()}
        wrong = {node: f"{off:+,.0f} s" for node, off in clocks.items() if abs(off) > CLOCK_S}
        free = {node: found.free_gib for node, found in self.answered.items()}
        full = {node: f"{gib:.2f} GiB free" for node, gib in free.items() if gib < LEAST_FREE_GIB}
        apart = {node: found.why for node, found in links.items() if isinstance(found, NoAnswer)}
        apart |= {node: "; ".join(each.unreachable) for node, each in links.items() if isinstance(each, Links)}
        ends = {node: found.certificate_days for node, found in self.answered.items() if found.certificate_days is not None}
        soon = {node: f"ends in {max(days, 0):.0f} days" for node, days in ends.items() if days < MIN_CERTIFICATE_DAYS}
        slow = {node: each.lookup_s for node, each in links.items() if isinstance(each, Links) and each.lookup_s > LOOKUP_S}
        return [
            _check("clocks", wrong, f"none is off by {CLOCK_S:g} s", "have the hosts keep time, by chrony for instance"),
            _check(
                "disks",
                full,
                f"{min(free.values(), default=0):.1f} GiB free at least",
                "free space, or name another place for copies of shards by $RAYSTRIDE_CACHE before `ray start`",
            ),
            _check(
                "network",
                {node: why for node, why in apart.items() if why},
                "each reaches each other" if links else "one host",
                "open the ports between the hosts; where an interface is not the one that they share, set "
                "GLOO_SOCKET_IFNAME to that one's name before `ray start`",
            ),
            _check(
                "certificates",
                soon,
                f"{min(ends.values()):.0f} days left at least" if ends else "none is used",
                "run `raystride certificates` for these hosts again, copy what it says, and start Ray again there",
            ),
            _check(
                "names",
                {node: f"{seconds:.0f} s to look up an address, at each start" for node, seconds in slow.items()},
                f"addresses are looked up within {LOOKUP_S:g} s",
                "have the name server in /etc/resolv.conf answer, or list all hosts in /etc/hosts",
            ),
        ]

    def table(self, links: Mapping[ClusterNode, Links | NoAnswer]) -> str:
        """A line a host: address, interface, free disk, how fast it sends to which other, versions."""
        rows = [("host", "address", "interface", "free GiB", "sends MiB/s", "to", "versions")]
        for node, found in self.seen.items():
            link = links.get(node)
            sent = ("", "", "")
            if isinstance(link, Links):
                sent = (link.interface, f"{link.mib_per_s:.0f}" if link.mib_per_s else "", link.to)
            free, said = ("", found.why) if isinstance(found, NoAnswer) else (f"{found.free_gib:.1f}", found.versions)
            rows.append((node.name, node.address, sent[0], free, *sent[1:], said))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def look_at_hosts(config: Config, storage: Folder, kept: Kept = NOTHING_KEPT) -> HostsSeen:
    """Looks at every host of the cluster that this process has joined.

    Raises SettingError and DataError where this process cannot read the data itself.
    """
    carried = Carried.here()
    carried.register()
    known = identity(config, build_task(config), kept, storage)
    missing = [name for name in config.by_source() if finished(storage / ".prepared" / known.of(name)) is None]
    sources = _sources(config) if missing else {}
    # What lies on a hub each host would have to fetch before it could say anything.
    needed = any(sources[name][0].kind != "huggingface" for name in missing)
    probe = storage / f".probe-{uuid.uuid4().hex[:8]}"
    probe.put("driver", "here")
    try:
        listed = _listed(config, list(sources.values())) if needed else None
        look, began = LookAtHost(config, probe, listed, carried), time.time()
        seen = ask_each_node(look, config.launch.timeout_s)
        asked, left = (began, time.time()), set(probe.names())
    finally:
        with suppress(OSError):  # where hosts write as other users their files may stay
            probe.remove()
    wrote = {node: found.mark for node, found in seen.items() if isinstance(found, HostSeen) and not found.storage}
    return HostsSeen(storage, seen, frozenset(node for node, mark in wrote.items() if mark not in left), asked)


def _off(now: float, asked: tuple[float, float]) -> float:
    """Seconds by which a clock is ahead at least; below 0: behind. It was looked at some time between two moments."""
    began, ended = asked
    return now - began if now < began else max(0.0, now - ended)


def _check(name: str, problems: Mapping[ClusterNode, str], fine: str, remedy: str) -> Check:
    found = "; ".join(f"{node.name} ({node.address}): {why}" for node, why in problems.items())
    return Check(name, not problems, found or fine, remedy)
