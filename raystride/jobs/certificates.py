"""Makes TLS certificates for the hosts of a cluster, in a folder for each.

    raystride certificates 10.0.0.1 10.0.0.2,gpu-2.example --output tls
    # tls/10.0.0.1/ goes to /etc/raystride/tls on that host, and `. /etc/raystride/tls/ray.env` before `ray start`

The folder keeps the authority: to add a host later, run the same command with its address. Exit codes: 0 done, 2 wrong
arguments.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from raystride.pipelines.launch.cluster.certificates import AUTHORITY_KEY, ENV_FILE, make_certificates


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes the folders and prints the copy commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="raystride certificates", description="Makes certificates for a cluster's TLS.")
    parser.add_argument("hosts", nargs="+", help="each host's address in the cluster, further names after commas")
    parser.add_argument("--output", default="tls", help="folder with a folder for each host, and the authority's key")
    parser.add_argument(
        "--at", dest="host_folder", metavar="AT", default="/etc/raystride/tls", help="where a host's folder will lie there"
    )
    parser.add_argument("--days", type=int, default=365, help="how long they hold (default 365)")
    args = parser.parse_args(arguments)
    made = make_certificates(Path(args.output), args.hosts, args.host_folder, args.days)
    print(f"results  {args.output}: folders for hosts, and {AUTHORITY_KEY}, which stays with you")
    for folder in made:
        print(f"copy     {copy_command(folder, args.host_folder)}")
    print(f"next     on each host: . {quote(f'{args.host_folder}/{ENV_FILE}')} && ray start ...")
    return 0


def copy_command(folder: Path, host_folder: str) -> str:
    """Returns a shell command that copies the content of a host's folder to that host and overwrites older files there."""
    host = folder.name
    target = f"[{host}]" if ":" in host else host  # scp would take the colons of IPv6 for its own
    destination = quote(f"{target}:{host_folder}/")
    return f"ssh {host} mkdir -p {quote(quote(host_folder))} && scp -p {quote(str(folder))}/* {destination}"
