"""Nsight Systems and Nsight Compute on a window of steps, in a process that was started under them.

Both see our phases as NVTX ranges, which are there in the window alone. `nsys` runs from the start and collects from `nsys
start` to `nsys stop`; `ncu` measures the kernels inside a range `step`, and writes its report when the process has ended.

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

from raystride.pipelines.files import strict_json
from raystride.pipelines.pages import heading, paragraph, table
from raystride.pipelines.phases import PHASES, Listener
from raystride.pipelines.profiling.nsight_commands import COMPUTE, SESSION, ProfileError, read_csv_table

LIMIT_S = 300.0
"""How long one command of nsys may take."""
SUMMARIES = (("nvtxsum", "nvtx_sum"), ("gpukernsum", "cuda_gpu_kern_sum"), ("cudaapisum", "cuda_api_sum"))
"""Reports of `nsys stats`, by their names until 2022 and since 2023; which of them hold anything depends on the device."""


def nvtx_listener() -> Listener:
    """Ranges that Nsight sees. Raises ProfileError where nothing here can make them."""
    # Else kernels of earlier steps, which still run, would be counted.
    if torch.cuda.is_available():
        return _cuda_range
    if find_spec("nvtx") is None:
        raise ProfileError("Nsight sees our phases only by the package nvtx, where PyTorch has no CUDA: pip install nvtx")
    import nvtx

    def annotate(name: str) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = nvtx.annotate(name)
        return made

    return annotate


@contextmanager
def _cuda_range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


class SystemsWindow:
    """Collects from `open` to `close`; looks whether there is a report, and sums it up.

    Raises ProfileError where nsys is not there or this process does not run under it; methods raise it where nsys fails.
    """

    def __init__(self) -> None:
        if which("nsys") is None:
            raise ProfileError("nsys is not on this node's PATH: install Nsight Systems there, or use profile.tool torch")
        session = os.environ.get(SESSION)
        if session is None:
            raise ProfileError("this process was not started under nsys: let train.py start it, with profile.tool nsys")
        self._session = session
        self.listener: Listener | None = nvtx_listener()
        self._folder = tempfile.TemporaryDirectory(prefix="nsys-")
        self._out = Path(self._folder.name) / "report"

    def open(self) -> None:
        """Begins to collect. Raises ProfileError where nsys refuses."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        options = ["--sample=none", "--cpuctxsw=none"]  # both want rights that containers rarely have
        _nsys("start", f"--session={self._session}", "--force-overwrite=true", f"--output={self._out}", *options)

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Ends, brings the report to `scratch` with summaries beside it, and returns parts of the page.

        Raises ProfileError where nsys left no report, or one in which none of our ranges is.
        """
        said = self._stop()
        report = self._report(said).rename(scratch / f"{stem}.nsys-rep")
        summaries = {names[-1]: _summary(report, names) for names in SUMMARIES}
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
        return _systems_part(ranges, summaries["cuda_gpu_kern_sum"], report.name)

    def abandon(self) -> None:
        """Ends and leaves nothing. Raises ProfileError where nsys fails."""
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> str:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return _nsys("stop", f"--session={self._session}")

    def _report(self, said: str) -> Path:
        """The report as a file that opens; nsys exits with 0 even where it wrote none."""
        report, raw = self._out.with_suffix(".nsys-rep"), self._out.with_suffix(".qdstrm")
        if not report.exists() and raw.exists():
            importer = _importer()
            if importer is None:
                raise ProfileError(
                    f"nsys left only {raw.name}: its QdstrmImporter is missing or not where nsys looks for it, beside its "
                    "target folder; install the whole of Nsight Systems"
                )
            _command([str(importer), "-i", str(raw), "-o", str(report)])
        if not report.exists():
            raise ProfileError(f"nsys ended without a report and said: {said.strip()[-500:] or 'nothing'}")
        return report


class ComputeWindow:
    """Opens ranges in the window, which is all that `ncu` waits for; its report comes when this process has ended.

    Raises ProfileError where this process does not run under ncu, or nothing here can make ranges.
    """

    def __init__(self) -> None:
        if COMPUTE not in os.environ:
            raise ProfileError("this process was not started under ncu: let train.py start it, with profile.tool ncu")
        self.listener: Listener | None = nvtx_listener()

    def open(self) -> None:
        """Nothing to do: ncu measures by the ranges of phases, which are open in the window."""

    def close(self, scratch: Path, stem: str) -> list[str]:
        """A sentence for the page: the figures come when this process has ended."""
        return [paragraph("Nsight Compute writes its figures of each kernel beside this page when the job has ended.")]

    def abandon(self) -> None:
        """Nothing to do: ncu writes what it has when this process ends."""


def _importer() -> Path | None:
    found = which("QdstrmImporter")
    if found:
        return Path(found)
    # Debian's package has it where its own nsys does not look.
    home = Path(str(which("nsys"))).resolve().parent
    places = [home, home.parent / "host-linux-x64", home.parent / "host-linux-armv8", *home.parent.glob("*/host-linux-*")]
    return next((place / "QdstrmImporter" for place in places if (place / "QdstrmImporter").exists()), None)


def _nsys(*arguments: str) -> str:
    return _command(["nsys", *arguments])


def _command(command: list[str]) -> str:
    """What a command printed. Raises ProfileError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    said = done.stdout + done.stderr
    if done.returncode:
        raise ProfileError(f"`{' '.join(command[:2])}` failed with {done.returncode}: {said.strip()[-500:]}")
    return said


def _summary(report: Path, names: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a report of `nsys stats` under the first of its names that this nsys knows; none where it has no data."""
    for name in names:
        command = ["nsys", "stats", "--report", name, "--format", "csv", "--output", "-", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if rows := read_csv_table(done.stdout):
            return rows
    return []


def _systems_part(ranges: list[dict[str, str]], kernels: list[dict[str, str]], report: str) -> list[str]:
    rows = [
        [row["Range"].lstrip(":"), row["Instances"], f"{float(row['Total Time (ns)']) / 1e6:.3f}", _milliseconds(row)]
        for row in ranges
    ]
    text = "What the process did in each of our ranges, by Nsight Systems' clock."
    parts = [heading("Ranges"), paragraph(text), table(["range", "times", "ms in all", "ms each"], rows)]
    if kernels:
        first = kernels[0]
        text = f"The device spent most of its time, {first['Time (%)']} %, in {first['Name']}."
        rows = [[row["Name"], row["Instances"], row["Time (%)"], _milliseconds(row)] for row in kernels[:20]]
        parts += [heading("Kernels"), paragraph(text), table(["kernel", "times", "% of the time", "ms each"], rows)]
    text = f"Open {report} in Nsight Systems (nsys-ui), this version or a newer: rows are threads and streams over time."
    return [*parts, heading("How to open the report"), paragraph(text)]


def _milliseconds(row: dict[str, str]) -> str:
    return f"{float(row['Avg (ns)']) / 1e6:.3f}"
