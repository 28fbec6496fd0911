"""PyTorch's own profiler on a window of steps: a trace, the costliest operations, and what memory was taken by whom.

tool = TorchTrace(); tool.open(); ...; findings = tool.close(scratch, "torch-rank0-steps20-25")
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from raystride.pipelines.files import strict_json
from raystride.pipelines.pages import heading, paragraph, table
from raystride.pipelines.phases import PHASES, Listener

COSTLIEST = 20
MOST_HISTORY = 100_000
"""Allocations and frees that a GPU's memory history keeps."""


class TorchTrace:
    """A Chrome trace, and the costliest operations as text and JSON."""

    listener: Listener | None = record_function

    def __init__(self) -> None:
        self._profile = new_profile()

    def open(self) -> None:
        """Begins to record; kernels of earlier steps are waited for, lest they be counted."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.start()

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Ends, writes `<stem>.*` into `scratch`, and returns parts of the page."""
        self.abandon()
        # Once, and compressed at once: a second export of the same profile raises "Trace is already saved".
        self._profile.export_chrome_trace(str(scratch / f"{stem}.json.gz"))
        averages = self._profile.key_averages()
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (scratch / f"{stem}-operations.txt").write_text(
            averages.table(sort_by=order, row_limit=COSTLIEST, max_name_column_width=60)
        )
        rows = costliest_operations(averages)
        (scratch / f"{stem}-operations.json").write_text(strict_json(rows, indent=1) + "\n")
        return [*_operations_part(rows), *_how_to_open(f"{stem}.json.gz")]

    def abandon(self) -> None:
        """Ends without a word, as after an error of the training."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()


class MemoryTimeline:
    """What memory holds: on GPUs a snapshot with its history, on CPUs a time line; and who takes most."""

    listener: Listener | None = record_function

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        # The time line tells parameters from activations by shapes and stacks.
        self._profile = None if self._on_gpu else new_profile(profile_memory=True, with_stack=True)

    def open(self) -> None:
        """Begins to record what memory is taken, and by whom."""
        if self._profile is None:
            torch.cuda.memory._record_memory_history(max_entries=MOST_HISTORY)
        else:
            self._profile.start()

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Ends, writes `<stem>.*` into `scratch`, and returns parts of the page."""
        if self._profile is None:
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(str(scratch / f"{stem}.pickle"))
            (scratch / f"{stem}-summary.txt").write_text(torch.cuda.memory_summary())
            self.abandon()
            peak = torch.cuda.max_memory_allocated() / 2**20
            text = f"The most that tensors held at once so far is {peak:,.1f} MiB. {stem}-summary.txt has PyTorch's account."
            how = f"Drag {stem}.pickle onto https://docs.pytorch.org/memory_viz: it shows each block and who asked for it."
            return [paragraph(text), heading("How to open it"), paragraph(how)]
        self.abandon()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is to be replaced by the snapshot, which is for GPUs alone
            self._profile.export_memory_timeline(str(scratch / f"{stem}-timeline.html"), device="cpu")
        rows = largest_allocations(self._profile.key_averages())
        (scratch / f"{stem}-allocations.json").write_text(strict_json(rows, indent=1) + "\n")
        return _allocations_part(rows, f"{stem}-timeline.html")

    def abandon(self) -> None:
        """Ends without a word, as after an error of the training."""
        if self._profile is None:
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            self._profile.stop()


def new_profile(**options: Any) -> Any:
    """PyTorch's profiler of all that is there, with the shapes of what operations take."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, record_shapes=True, acc_events=True, **options)


def costliest_operations(averages: Any) -> list[dict[str, Any]]:
    """The operations with the most time of their own, the device's where there is one; our phases are none."""
    rows = [
        {
            "name": each.key,
            "calls": each.count,
            "self_cpu_us": float(each.self_cpu_time_total),
            "self_device_us": float(each.self_device_time_total),
        }
        for each in averages
        if each.device_type == DeviceType.CPU and each.key not in PHASES
    ]
    of = "self_device_us" if any(row["self_device_us"] for row in rows) else "self_cpu_us"
    whole = sum(row[of] for row in rows) or 1.0
    rows.sort(key=lambda row: -row[of])
    return [row | {"share": row[of] / whole} for row in rows[:COSTLIEST]]


def largest_allocations(averages: Any) -> list[dict[str, Any]]:
    """The operations that themselves took the most memory over the window, in bytes; what they gave back is taken off."""
    rows = [
        {"name": each.key, "calls": each.count, "self_bytes": int(each.self_cpu_memory_usage)}
        for each in averages
        if each.self_cpu_memory_usage > 0 and each.key not in PHASES
    ]
    return sorted(rows, key=lambda row: -row["self_bytes"])[:COSTLIEST]


def _operations_part(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return [paragraph("No operation ran in these steps.")]
    first = rows[0]
    text = f"The costliest operation is {first['name']}, with {first['share']:.0%} of the time of all operations."
    cells = [
        [
            row["name"],
            str(row["calls"]),
            f"{row['self_cpu_us'] / 1e3:.3f}",
            f"{row['self_device_us'] / 1e3:.3f}",
            f"{row['share']:.1%}",
        ]
        for row in rows
    ]
    head = ["operation", "calls", "host, ms", "device, ms", "share"]
    return [heading("Operations"), paragraph(text + " Times are their own, without what they call."), table(head, cells)]


def _how_to_open(trace: str) -> list[str]:
    text = (
        f"Drag {trace} onto https://ui.perfetto.dev, or open it at chrome://tracing. Each row is a thread or a stream of "
        "the device; the ranges step, forward, backward, reduce and update are ours, and what lies below them is PyTorch's."
    )
    return [heading("How to open the trace"), paragraph(text)]


def _allocations_part(rows: list[dict[str, Any]], timeline: str) -> list[str]:
    parts = [heading("Who takes memory")]
    if rows:
        text = f"{rows[0]['name']} takes the most: {rows[0]['self_bytes'] / 2**20:.2f} MiB over these steps."
        cells = [[row["name"], str(row["calls"]), f"{row['self_bytes'] / 2**20:.3f}"] for row in rows]
        parts += [paragraph(text), table(["operation", "calls", "MiB"], cells)]
    text = f"{timeline} opens in a browser: bytes over time, by what they are for (parameters, gradients, activations)."
    return [*parts, heading("How to open the time line"), paragraph(text)]
