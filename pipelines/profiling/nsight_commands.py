"""How processes are started so that Nsight can look into them, and what its tables say. Needs neither torch nor Nsight.

command = [*systems_command("s1", "cuda"), sys.executable, "train.py"]     # this process may then make a SystemsWindow()
"""

import csv
import shlex
import sys

SESSION = "RAYSTRIDE_NSYS_SESSION"
"""In the environment of a process under `nsys launch`: the session's name."""
COMPUTE = "RAYSTRIDE_NCU"
"""In the environment of a process under `ncu`: that it is."""


class ProfileError(RuntimeError):
    """A profile could not be made; the message says why, and what to do."""


def systems_command(session: str, device: str) -> list[str]:
    """What to put before a command so that it runs under `nsys launch`, not collecting yet."""
    traces = "cuda,nvtx,osrt" if device == "cuda" else "nvtx,osrt"
    return ["env", f"{SESSION}={session}", "nsys", "launch", f"--trace={traces}", f"--session-new={session}"]


def worker_executable(device: str) -> str:
    """For Ray, the Python of workers that run under `nsys launch`, each with a session of its own.

    On a node without nsys it is plain Python, and the observer says what is missing: Ray would only say that no worker came.
    """
    launch = " ".join(systems_command("raystride$$", device))
    script = f"""P={shlex.quote(sys.executable)}; [ -x $P ] || P=python3
command -v nsys >/dev/null || exec $P "$@"
exec {launch} $P "$@\""""
    return f"bash -c {shlex.quote(script)} worker"


def compute_command(report: str, kernel: str, log: str) -> list[str]:
    """What to put before a command so that `ncu` measures the kernels within our ranges `step`, which only windows open."""
    chosen = ["--kernel-name", f"regex:{kernel}"] if kernel else []
    filters = ["--nvtx", "--nvtx-include", "step/", *chosen, "--section", "SpeedOfLight"]
    return ["env", f"{COMPUTE}=1", "ncu", *filters, "--log-file", log, "--force-overwrite", "--export", report]


def read_csv_table(text: str) -> list[dict[str, str]]:
    """The CSV table in what a tool printed, whose header is the first line with several commas."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.count(",") >= 3), len(lines))
    return list(csv.DictReader(line for line in lines[start:] if line.strip()))
