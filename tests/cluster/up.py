"""A Ray cluster on hosts of this machine, and a shell on its head, to try things by hand; all is gone when the shell ends.

python -m tests.cluster.up --hosts 4 --bandwidth 100mbit --latency 10
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.hosts import unable
from tests.cluster.ray_hosts import RayHosts


def main() -> int:
    """Makes the hosts and gives the shell; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="how many have Ray, the first its head (default 4)")
    parser.add_argument("--others", type=int, default=1, help="how many have none, such as a user's machine (default 1)")
    parser.add_argument("--bandwidth", default="", help="of each, such as 100mbit (default: what memory gives)")
    parser.add_argument("--latency", type=float, default=0.0, help="of each one's cable, milliseconds each way (default 0)")
    given = parser.parse_args()
    if why := unable(*(["tc"] if given.bandwidth else [])):
        print(f"no hosts here: {why}", file=sys.stderr)
        return 3
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as folder,
        RayHosts(Path(folder), given.hosts, given.others, given.bandwidth, latency_ms=given.latency) as cluster,
    ):
        for number, host in enumerate(cluster.hosts.all):
            kind = "head" if number == 0 else "worker" if number < given.hosts else "without Ray"
            print(f"{host.name:<4} {host.address:<14} {kind:<12} {' '.join(host.command(['bash']))}")
        print(
            f"shared by all: {folder}\njobs go to {cluster.address}\nthis shell is on {cluster.head.name}; its end ends all"
        )
        shell = cluster.head.command(["bash", "--norc", "-i"])
        return subprocess.run(shell, env=os.environ | cluster.variables | {"PS1": "h1$ "}).returncode


if __name__ == "__main__":
    sys.exit(main())
