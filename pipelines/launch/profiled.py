"""Runs a job under a profiler that has to start it: the job executes itself again under the profiler and reports on it.

    code = run_under_profiler(config, storage)                # None: continue here; else the exit code of the profiled job

Nsight Systems needs it for inline jobs (Ray's workers are started under it by `trainer`), Nsight Compute always.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

from raystride.pipelines.config import Config, ProfileConfig, RecordConfig
from raystride.pipelines.launch.cluster.cluster import uses_running_cluster
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.observability.profiling.nsight_commands import (
    NCU_VARIABLE,
    NSYS_SESSION_VARIABLE,
    compute_command,
    systems_command,
)
from raystride.pipelines.observability.profiling.nsight_compute import (
    REPORT,
    explain_missing_report,
    parse_speed_of_light,
    render_compute_page,
    store_report,
)
from raystride.pipelines.observability.profiling.profile import PROFILES_FOLDER
from raystride.pipelines.system.storage.folder import Folder, strict_json
from raystride.triton_kernels.processes import run_in_group

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
    if which(tool) is None and not uses_running_cluster(config.launch):
        raise config.profile.error("tool", f"needs the program {tool}, which is not there: {REMEDIES[tool]}")
    if tool == "ncu":
        return _run_under_ncu(config.run, config.record, config.profile, storage)
    if inline:
        device = Resources.of_this_machine().choose_device(config.scaling.device)
        command = systems_command(f"raystride{os.getpid()}", device)
        os.execvp(command[0], [*command, *_this_command()])  # noqa: S606  (this process becomes the other)
    return None


def _this_command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _run_under_ncu(run: str | None, record: RecordConfig, profile: ProfileConfig, storage: Folder) -> int:
    assert run
    with tempfile.TemporaryDirectory(prefix="ncu-") as name:
        scratch = Path(name)
        report, log = scratch / f"{REPORT}.ncu-rep", scratch / f"{REPORT}.log"
        command = compute_command(str(scratch / REPORT), profile.kernel, str(log))
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
        (scratch / f"{REPORT}.html").write_text(render_compute_page(run, rows))
        store_report(run, record, storage, scratch)
    print(f"profile  {storage / run / PROFILES_FOLDER / f'{REPORT}.html'}")
    return code
