"""Jobs that a profiler has to start: the job executes itself once more, under the profiler, and sums up what it left.

    code = under_profiler(config, storage)                    # None: go on here; else the exit code of the job that ran

Nsight Systems needs it for inline jobs (Ray's workers are started under it by `trainer`), Nsight Compute always.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import which

from raystride.pipelines.cluster.resources import Resources, resolve
from raystride.pipelines.config import Config
from raystride.pipelines.credentials import hidden
from raystride.pipelines.files import Folder, strict_json
from raystride.pipelines.pages import heading, page, paragraph, table
from raystride.pipelines.profiling.nsight_commands import COMPUTE, SESSION, compute_command, read_csv_table, systems_command
from raystride.pipelines.profiling.profile import PLACE
from raystride.pipelines.record.entry import new_entry
from raystride.pipelines.record.mlflow_log import MlflowLog
from raystride.triton_kernels.processes import run_in_group

REPORT = "ncu"
COMPUTED, MOVED, LASTED = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
"""Nsight Compute's speed of light: the share of the peak that arithmetic and memory reached, and the duration."""
KERNELS = 200
"""Rows of the page at most; the report has all."""
REMEDIES = {
    "nsys": "install Nsight Systems and put nsys on PATH, or use profile.tool torch",
    "ncu": "install Nsight Compute and put ncu on PATH, or use profile.tool torch",
}


def under_profiler(config: Config, storage: Folder) -> int | None:
    """Runs this very command under its profiler, where that has to start it. Raises SettingError where it is not there."""
    tool, inline = config.profile.tool, config.launch.mode == "inline"
    # Under the profiler the job comes here again, and then goes on.
    if tool not in REMEDIES or SESSION in os.environ or COMPUTE in os.environ:
        return None
    if which(tool) is None and config.launch.address is None and "RAY_ADDRESS" not in os.environ:
        raise config.profile.error("tool", f"needs the program {tool}, which is not there: {REMEDIES[tool]}")
    if tool == "ncu":
        return _under_compute(config, storage)
    if inline:
        device = resolve(config, Resources.of_this_machine()).device
        command = systems_command(f"raystride{os.getpid()}", device)
        os.execvp(command[0], [*command, *_this_command()])  # noqa: S606  (this process becomes the other)
    return None


def _this_command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _under_compute(config: Config, storage: Folder) -> int:
    assert config.run
    folder = storage / config.run
    with tempfile.TemporaryDirectory(prefix="ncu-") as name:
        scratch = Path(name)
        report, log = scratch / f"{REPORT}.ncu-rep", scratch / f"{REPORT}.log"
        command = compute_command(str(scratch / REPORT), config.profile.kernel, str(log))
        code = run_in_group([*command, *_this_command()])
        said = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        if not report.exists():
            print(f"warning: there is no profile by ncu: {why_no_report(said)}", file=sys.stderr)
            return code
        sheet = subprocess.run(
            ["ncu", "--import", str(report), "--csv", "--page", "raw"], capture_output=True, text=True, check=False
        )
        rows = speed_of_light(sheet.stdout)
        (scratch / f"{REPORT}.csv").write_text(sheet.stdout)
        (scratch / f"{REPORT}.json").write_text(strict_json(rows, indent=1) + "\n")
        (scratch / f"{REPORT}.html").write_text(compute_page(config.run, rows))
        _keep(config, storage, folder, scratch)
    print(f"profile  {folder / PLACE / f'{REPORT}.html'}")
    return code


def why_no_report(said: str) -> str:
    """The reason and its remedy, from what ncu said."""
    if "ERR_NVGPUCTRPERM" in said:
        return (
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM): run as root, with "
            "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "No kernels were profiled" in said:
        return "no kernel ran within profile.steps on a GPU, or none matches profile.kernel"
    return said.strip()[-500:] or "ncu wrote nothing"


def speed_of_light(text: str) -> list[dict[str, float | str]]:
    """Kernel, microseconds and shares of the peaks, from `ncu --csv --page raw`: header, a row of units, a row a launch."""
    rows = read_csv_table(text)
    if not rows:
        return []
    units = rows[0]
    found: list[dict[str, float | str]] = []
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}[units[LASTED]]
    for row in rows[1:]:
        lasted, computed, moved = (float(row[key].replace(",", "")) for key in (LASTED, COMPUTED, MOVED))
        found.append({"kernel": row["Kernel Name"], "us": lasted * scale, "compute_%": computed, "memory_%": moved})
    return found


def compute_page(run: str, rows: list[dict[str, float | str]]) -> str:
    """What the figures say, in words and as a table."""
    slowest = sorted(rows, key=lambda row: -float(row["us"]))
    parts = []
    if slowest:
        first = slowest[0]
        bound = "memory" if float(first["memory_%"]) > float(first["compute_%"]) else "arithmetic"
        text = (
            f"{len(rows)} launches were measured, each run several times and alone. The longest is {first['kernel']}: "
            f"{float(first['us']):.1f} µs at {float(first['compute_%']):.0f} % of the peak of arithmetic and "
            f"{float(first['memory_%']):.0f} % of that of memory, so {bound} is nearer to its limit. Where both are below "
            "60 %, waiting costs more than either."
        )
        cells = [
            [str(row["kernel"]), *(f"{float(row[key]):.1f}" for key in ("us", "compute_%", "memory_%"))] for row in slowest
        ]
        parts += [paragraph(text), table(["kernel", "µs", "arithmetic, %", "memory, %"], cells[:KERNELS])]
    how = paragraph(f"Open {REPORT}.ncu-rep in Nsight Compute (ncu-ui).")
    return page(f"Nsight Compute: {run}", heading("Kernels"), *parts, heading("How to open the report"), how)


def _keep(config: Config, storage: Folder, folder: Folder, scratch: Path) -> None:
    """Copies the files to the run's folder and, as the run's record is closed by now, opens it in MLflow once more."""
    assert config.run
    names = []
    for file in sorted(scratch.iterdir()):
        names.append(f"{PLACE}/{file.name}")
        folder.upload(file, names[-1])
    log = MlflowLog.at(folder, config.run, config.record, storage)
    if log is None:
        return
    try:
        log.log([new_entry("artifact", {"name": name}) for name in names])
        log.finish(folder.read_json("summary.json")["status"], time.time())
    except Exception as error:  # a tracking server that is away; the files are in the run's folder
        print(hidden(f"warning: the profile is not in MLflow ({type(error).__name__}: {error})"), file=sys.stderr)
