"""Runs a job under a profiler that has to start it: the job executes itself again under the profiler and reports on it.

    code = run_under_profiler(config, storage)                # None: continue here; else the exit code of the profiled job

Nsight Systems needs it for inline jobs (Ray's workers are started under it by `trainer`), Nsight Compute always.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import which

from raystride.pipelines.config import Config
from raystride.pipelines.launch.cluster.resources import Resources, resolve_allocation
from raystride.pipelines.observability.pages import heading, html_page, html_table, paragraph
from raystride.pipelines.observability.profiling.nsight_commands import (
    NCU_VARIABLE,
    NSYS_SESSION_VARIABLE,
    compute_command,
    read_csv_table,
    systems_command,
)
from raystride.pipelines.observability.profiling.profile import PROFILES_FOLDER
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.storage.folder import Folder, strict_json
from raystride.triton_kernels.processes import run_in_group

REPORT = "ncu"
COMPUTE_METRIC, MEMORY_METRIC, DURATION_METRIC = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
"""Nsight Compute's speed of light: percent of peak arithmetic and memory throughput, and the duration."""
MAX_ROWS = 200
"""Largest number of rows on the page; the report has all."""
REMEDIES = {
    "nsys": "install Nsight Systems and put nsys on PATH, or use profile.tool torch",
    "ncu": "install Nsight Compute and put ncu on PATH, or use profile.tool torch",
}


def run_under_profiler(config: Config, storage: Folder) -> int | None:
    """Runs this command again under a profiler that has to start it; returns its exit code, None if no profiler has to.

    Raises SettingError if the profiler is not installed.
    """
    tool, inline = config.profile.tool, config.launch.mode == "inline"
    # The job under the profiler also calls this function, and then continues.
    if tool not in REMEDIES or NSYS_SESSION_VARIABLE in os.environ or NCU_VARIABLE in os.environ:
        return None
    if which(tool) is None and config.launch.address is None and "RAY_ADDRESS" not in os.environ:
        raise config.profile.error("tool", f"needs the program {tool}, which is not there: {REMEDIES[tool]}")
    if tool == "ncu":
        return _run_under_ncu(config, storage)
    if inline:
        device = resolve_allocation(config, Resources.of_this_machine()).device
        command = systems_command(f"raystride{os.getpid()}", device)
        os.execvp(command[0], [*command, *_this_command()])  # noqa: S606  (this process becomes the other)
    return None


def _this_command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _run_under_ncu(config: Config, storage: Folder) -> int:
    assert config.run
    folder = storage / config.run
    with tempfile.TemporaryDirectory(prefix="ncu-") as name:
        scratch = Path(name)
        report, log = scratch / f"{REPORT}.ncu-rep", scratch / f"{REPORT}.log"
        command = compute_command(str(scratch / REPORT), config.profile.kernel, str(log))
        code = run_in_group([*command, *_this_command()])
        output = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        if not report.exists():
            print(f"warning: there is no profile by ncu: {explain_missing_report(output)}", file=sys.stderr)
            return code
        sheet = subprocess.run(
            ["ncu", "--import", str(report), "--csv", "--page", "raw"], capture_output=True, text=True, check=False
        )
        rows = parse_speed_of_light(sheet.stdout)
        (scratch / f"{REPORT}.csv").write_text(sheet.stdout)
        (scratch / f"{REPORT}.json").write_text(strict_json(rows, indent=1) + "\n")
        (scratch / f"{REPORT}.html").write_text(render_compute_page(config.run, rows))
        _store_report(config, storage, folder, scratch)
    print(f"profile  {folder / PROFILES_FOLDER / f'{REPORT}.html'}")
    return code


def explain_missing_report(output: str) -> str:
    """Returns the reason for a missing report and the remedy, from ncu's output."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM): run as root, with "
            "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "No kernels were profiled" in output:
        return "no kernel ran within profile.steps on a GPU, or none matches profile.kernel"
    return output.strip()[-500:] or "ncu wrote nothing"


def parse_speed_of_light(text: str) -> list[dict[str, float | str]]:
    """Parses kernel, microseconds and percent of the peaks from `ncu --csv --page raw`: header, units, a row a launch."""
    rows = read_csv_table(text)
    if not rows:
        return []
    units = rows[0]
    launches: list[dict[str, float | str]] = []
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}[units[DURATION_METRIC]]
    for row in rows[1:]:
        duration, compute_percent, memory_percent = (
            float(row[key].replace(",", "")) for key in (DURATION_METRIC, COMPUTE_METRIC, MEMORY_METRIC)
        )
        launches.append(
            {"kernel": row["Kernel Name"], "us": duration * scale, "compute_%": compute_percent, "memory_%": memory_percent}
        )
    return launches


def render_compute_page(run: str, rows: list[dict[str, float | str]]) -> str:
    """Renders the page with a summary and a table of the kernel launches."""
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
        parts += [paragraph(text), html_table(["kernel", "µs", "arithmetic, %", "memory, %"], cells[:MAX_ROWS])]
    how_to_open = paragraph(f"Open {REPORT}.ncu-rep in Nsight Compute (ncu-ui).")
    return html_page(f"Nsight Compute: {run}", heading("Kernels"), *parts, heading("How to open the report"), how_to_open)


def _store_report(config: Config, storage: Folder, folder: Folder, scratch: Path) -> None:
    """Copies the files to the run's folder and logs them to MLflow, where it reopens the run, as its record is closed."""
    assert config.run
    names = []
    for file in sorted(scratch.iterdir()):
        names.append(f"{PROFILES_FOLDER}/{file.name}")
        folder.upload(file, names[-1])
    log = MlflowLog.for_run(folder, config.run, config.record, storage)
    if log is None:
        return
    try:
        log.log([new_entry("artifact", {"name": name}) for name in names])
        log.finish(folder.read_json("summary.json")["status"], time.time())
    except Exception as error:  # the tracking server is unreachable; the files are in the run's folder
        print(redact(f"warning: the profile is not in MLflow ({type(error).__name__}: {error})"), file=sys.stderr)
