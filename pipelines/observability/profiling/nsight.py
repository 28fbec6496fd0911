"""Nsight Systems and Nsight Compute for a window of steps, in a process started under one of them.

Both see our phases as NVTX ranges, which exist only in the window. `nsys` runs from the start and collects from `nsys start`
to `nsys stop`. `ncu` measures the kernels inside a range `step`, and writes its report when the process has ended.

    tool = SystemsWindow(); tool.open(); ...; parts = tool.close(scratch, "nsys-rank0-steps20-25")
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from raystride.pipelines.observability.pages import heading, html_table, paragraph
from raystride.pipelines.observability.phases import PHASES, Listener
from raystride.pipelines.observability.profiling.nsight_commands import (
    NCU_VARIABLE,
    NSYS_SESSION_VARIABLE,
    ProfileError,
    read_csv_table,
)
from raystride.pipelines.system.storage.folder import strict_json

COMMAND_TIMEOUT_S = 300.0
"""Maximum seconds of one nsys command."""
SUMMARIES = (("nvtxsum", "nvtx_sum"), ("gpukernsum", "cuda_gpu_kern_sum"), ("cudaapisum", "cuda_api_sum"))
"""Reports of `nsys stats`, by their names until 2022 and since 2023; some are empty, depending on the device."""


def nvtx_listener() -> Listener:
    """Returns a listener that makes NVTX ranges of phases. Raises ProfileError if neither CUDA nor the nvtx package can."""
    # Else kernels of earlier steps that still run would be counted.
    if torch.cuda.is_available():
        return _cuda_range
    if find_spec("nvtx") is None:
        raise ProfileError("Nsight sees our phases only by the package nvtx, where PyTorch has no CUDA: pip install nvtx")
    import nvtx

    def make_nvtx_range(name: str) -> AbstractContextManager[Any]:
        nvtx_range: AbstractContextManager[Any] = nvtx.annotate(name)
        return nvtx_range

    return make_nvtx_range


@contextmanager
def _cuda_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


class SystemsWindow:
    """Nsight Systems collection from `open` to `close`, with a check and a summary of its report.

    Raises ProfileError if nsys is missing or this process does not run under it; methods raise it if nsys fails.
    """

    def __init__(self) -> None:
        if which("nsys") is None:
            raise ProfileError("nsys is not on this node's PATH: install Nsight Systems there, or use profile.tool torch")
        session = os.environ.get(NSYS_SESSION_VARIABLE)
        if session is None:
            raise ProfileError("this process was not started under nsys: let train.py start it, with profile.tool nsys")
        self._session = session
        self.listener: Listener | None = nvtx_listener()
        # The first range connects this process to nsys, which on a busy machine takes longer than a window of short steps.
        with self.listener("connect"):
            pass
        self._folder = tempfile.TemporaryDirectory(prefix="nsys-")
        self._out = Path(self._folder.name) / "report"

    def open(self) -> None:
        """Starts the collection. Raises ProfileError if nsys refuses."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        options = ["--sample=none", "--cpuctxsw=none"]  # both need privileges that containers rarely have
        _run_nsys("start", f"--session={self._session}", "--force-overwrite=true", f"--output={self._out}", *options)

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Stops, moves the report to `scratch`, writes summaries beside it, and returns sections of the page.

        Raises ProfileError if nsys left no report, or one without any of our ranges.
        """
        output = self._stop_collecting()
        report = self._find_report(output).rename(scratch / f"{stem}.nsys-rep")
        summaries = {names[-1]: _read_summary(report, names) for names in SUMMARIES}
        report.with_suffix(".sqlite").unlink(missing_ok=True)
        for name, rows in summaries.items():
            if rows:
                (scratch / f"{stem}-{name}.json").write_text(strict_json(rows, indent=1) + "\n")
        ranges = [row for row in summaries["nvtx_sum"] if row.get("Range", "").lstrip(":") in PHASES]
        if not ranges:
            raise ProfileError(
                f"the report is there ({report.name}), but none of our ranges is in it. Older nsys does not hear newer "
                "packages of NVTX: with nsys 2022, pip install nvtx==0.2.10; or take a newer Nsight Systems"
            )
        return _systems_sections(ranges, summaries["cuda_gpu_kern_sum"], report.name)

    def abandon(self) -> None:
        """Stops and discards the report. Raises ProfileError if nsys fails."""
        self._stop_collecting()
        self._folder.cleanup()

    def _stop_collecting(self) -> str:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return _run_nsys("stop", f"--session={self._session}")

    def _find_report(self, output: str) -> Path:
        """Returns the report as a file that can be opened; nsys exits with 0 even if it wrote none."""
        report, raw = self._out.with_suffix(".nsys-rep"), self._out.with_suffix(".qdstrm")
        if not report.exists() and raw.exists():
            importer = _find_importer()
            if importer is None:
                raise ProfileError(
                    f"nsys left only {raw.name}: its QdstrmImporter is missing or not where nsys looks for it, beside its "
                    "target folder; install the whole of Nsight Systems"
                )
            _run_command([str(importer), "-i", str(raw), "-o", str(report)])
        if not report.exists():
            raise ProfileError(f"nsys ended without a report and said: {output.strip()[-500:] or 'nothing'}")
        return report


class ComputeWindow:
    """Nsight Compute measurement of the window: it only makes NVTX ranges, and `ncu` reports when this process has ended.

    Raises ProfileError if this process does not run under ncu, or cannot make ranges.
    """

    def __init__(self) -> None:
        if NCU_VARIABLE not in os.environ:
            raise ProfileError("this process was not started under ncu: let train.py start it, with profile.tool ncu")
        self.listener: Listener | None = nvtx_listener()

    def open(self) -> None:
        """Does nothing: ncu measures by the ranges of phases, which are made only in the window."""

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Returns a sentence for the page: the figures are written when this process has ended."""
        return [paragraph("Nsight Compute writes its figures of each kernel beside this page when the job has ended.")]

    def abandon(self) -> None:
        """Does nothing: ncu writes its report when this process ends."""


def _find_importer() -> Path | None:
    importer = which("QdstrmImporter")
    if importer:
        return Path(importer)
    # Debian's package installs it outside the search path of its own nsys.
    home = Path(str(which("nsys"))).resolve().parent
    places = [home, home.parent / "host-linux-x64", home.parent / "host-linux-armv8", *home.parent.glob("*/host-linux-*")]
    return next((place / "QdstrmImporter" for place in places if (place / "QdstrmImporter").exists()), None)


def _run_nsys(*arguments: str) -> str:
    return _run_command(["nsys", *arguments])


def _run_command(command: list[str]) -> str:
    """Runs a command and returns its output. Raises ProfileError if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    output = process.stdout + process.stderr
    if process.returncode:
        raise ProfileError(f"`{' '.join(command[:2])}` failed with {process.returncode}: {output.strip()[-500:]}")
    return output


def _read_summary(report: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns the rows of a report of `nsys stats`, under the first of its names that this nsys knows; [] without data."""
    for name in names:
        command = ["nsys", "stats", "--report", name, "--format", "csv", "--output", "-", str(report)]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
        if rows := read_csv_table(process.stdout):
            return rows
    return []


def _systems_sections(ranges: list[dict[str, str]], kernels: list[dict[str, str]], report: str) -> list[str]:
    rows = [
        [row["Range"].lstrip(":"), row["Instances"], f"{float(row['Total Time (ns)']) / 1e6:.3f}", _average_ms(row)]
        for row in ranges
    ]
    text = "What the process did in each of our ranges, by Nsight Systems' clock."
    parts = [heading("Ranges"), paragraph(text), html_table(["range", "times", "ms in all", "ms each"], rows)]
    if kernels:
        first = kernels[0]
        text = f"The device spent most of its time, {first['Time (%)']} %, in {first['Name']}."
        rows = [[row["Name"], row["Instances"], row["Time (%)"], _average_ms(row)] for row in kernels[:20]]
        parts += [heading("Kernels"), paragraph(text), html_table(["kernel", "times", "% of the time", "ms each"], rows)]
    text = f"Open {report} in Nsight Systems (nsys-ui), this version or a newer: rows are threads and streams over time."
    return [*parts, heading("How to open the report"), paragraph(text)]


def _average_ms(row: dict[str, str]) -> str:
    return f"{float(row['Avg (ns)']) / 1e6:.3f}"
