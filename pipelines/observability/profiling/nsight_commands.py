"""Command lines that start processes under Nsight, and a parser of its CSV tables. Needs neither torch nor Nsight.

command = [*systems_command("s1", "cuda"), sys.executable, "train.py"]     # this process may then make a SystemsWindow()
"""

import csv
import shlex
import sys

NSYS_SESSION_VARIABLE = "RAYSTRIDE_NSYS_SESSION"
"""Environment variable of a process under `nsys launch`: the session's name."""
NCU_VARIABLE = "RAYSTRIDE_NCU"
"""Environment variable that marks a process under `ncu`."""


class ProfileError(RuntimeError):
    """A profile could not be made; the message gives the reason and a remedy."""


def systems_command(session: str, device: str) -> list[str]:
    """Returns the prefix of a command that runs it under `nsys launch`, not collecting yet."""
    traces = "cuda,nvtx,osrt" if device == "cuda" else "nvtx,osrt"
    return ["env", f"{NSYS_SESSION_VARIABLE}={session}", "nsys", "launch", f"--trace={traces}", f"--session-new={session}"]


def worker_executable(device: str) -> str:
    """Returns the Python executable, for Ray, of workers under `nsys launch`, each with its own session.

    On a node without nsys it is plain Python, and the observer reports that nsys is missing: Ray would only report that no
    worker started.
    """
    launch = " ".join(systems_command("raystride$$", device))
    script = f"""P={shlex.quote(sys.executable)}; [ -x $P ] || P=python3
command -v nsys >/dev/null || exec $P "$@"
exec {launch} $P "$@\""""
    return f"bash -c {shlex.quote(script)} worker"


def compute_command(report: str, kernel: str, log: str) -> list[str]:
    """Returns the prefix of a command that has `ncu` measure the kernels in our ranges `step`, made only in windows."""
    chosen = ["--kernel-name", f"regex:{kernel}"] if kernel else []
    filters = ["--nvtx", "--nvtx-include", "step/", *chosen, "--section", "SpeedOfLight"]
    return ["env", f"{NCU_VARIABLE}=1", "ncu", *filters, "--log-file", log, "--force-overwrite", "--export", report]


def read_csv_table(text: str) -> list[dict[str, str]]:
    """Parses the CSV table in a tool's output; its header is the first line with at least three commas."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.count(",") >= 3), len(lines))
    return list(csv.DictReader(line for line in lines[start:] if line.strip()))
