"""Hosts on this machine, see `tests.cluster.hosts`, that are reached by ssh like separate machines.

    with SshHosts(tmp_path, 2) as machines:               # needs root, sshd and rsync; see `ssh_skip_reason()`
        machines.addresses, machines.key                  # ["10.77.3.1", "10.77.3.2"], a private key that opens both

Each host has its own home folder in its own /tmp. The machine's ssh keys and files are not touched.
"""

import contextlib
import subprocess
from pathlib import Path
from typing import Self

from tests.cluster.hosts import Hosts, unable

CONFIGURATION = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""
PREPARE = """
sed 's|^root:.*|root:x:0:0:root:/tmp/home:/bin/bash|' /etc/passwd > "$1/passwd.$2"; mount --bind "$1/passwd.$2" /etc/passwd
mkdir -p /tmp/sshd; mount -t tmpfs tmpfs /run; mkdir -p /run/sshd
"""


def ssh_skip_reason() -> str:
    """Returns why such hosts cannot run on this machine, or an empty text."""
    return unable("sshd", "ssh", "ssh-keygen", "rsync")


class SshHosts(contextlib.AbstractContextManager["SshHosts"]):
    """Several hosts that run sshd."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.hosts = folder, Hosts(folder, count)
        self.key = folder / "key"
        self._running = contextlib.ExitStack()

    @property
    def addresses(self) -> list[str]:
        """Addresses of the hosts, in their order."""
        return [host.address for host in self.hosts.all]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(self.hosts)
            for name in ("key", "host_key"):
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)
            for host in hosts.all:
                host.run("sh", "-euc", PREPARE, "prepare", str(self.folder), host.name)
                file = self.folder / f"sshd.{host.name}"
                file.write_text(CONFIGURATION.format(address=host.address, folder=self.folder))
                log = self.folder / f"sshd.{host.name}.log"
                daemon = host.start("/usr/sbin/sshd", "-D", "-e", "-f", str(file), log=log)
                stack.callback(daemon.wait)
                stack.callback(daemon.kill)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()
