"""Report of Nsight Compute: its launches as a table and a page, and its files in the run's folder and in MLflow.

rows = parse_speed_of_light(csv)                          # [{"kernel": "attention_forward", "us": 41.2, ...}, ...]
store_report("mine", config.record, storage, scratch)     # the profiler's files, after the run has ended
"""

import sys
import time
from pathlib import Path

from raystride.pipelines.config import RecordConfig
from raystride.pipelines.observability.pages import heading, html_page, html_table, paragraph
from raystride.pipelines.observability.profiling.nsight_commands import read_csv_table
from raystride.pipelines.observability.profiling.profile import PROFILES_FOLDER
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.storage.folder import Folder

REPORT = "ncu"
COMPUTE_METRIC, MEMORY_METRIC, DURATION_METRIC = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__time_duration.sum",
)
"""Nsight Compute's speed of light: percent of peak arithmetic and memory throughput, and the duration."""
MAX_ROWS = 200
"""Largest number of rows on the page; the report has all."""


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


def store_report(run: str, record: RecordConfig, storage: Folder, scratch: Path) -> None:
    """Copies the files to the run's folder and logs them to MLflow, where it reopens the run, as its record is closed."""
    folder, names = storage / run, []
    for file in sorted(scratch.iterdir()):
        names.append(f"{PROFILES_FOLDER}/{file.name}")
        folder.upload(file, names[-1])
    log = MlflowLog.for_run(folder, run, record, storage)
    if log is None:
        return
    try:
        log.log([new_entry("artifact", {"name": name}) for name in names])
        log.end_run(read_summary(folder)["status"], time.time())
    except Exception as error:  # the tracking server is unreachable; the files are in the run's folder
        print(redact(f"warning: the profile is not in MLflow ({type(error).__name__}: {error})"), file=sys.stderr)
