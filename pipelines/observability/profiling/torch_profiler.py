"""PyTorch's profiler for a window of steps: a trace, the costliest operations, and memory by operation.

tool = TorchTrace(); tool.open(); ...; findings = tool.close(scratch, "torch-rank0-steps20-25")
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from raystride.pipelines.observability.pages import heading, html_table, paragraph
from raystride.pipelines.observability.phases import PHASES, Listener
from raystride.pipelines.system.storage.folder import strict_json

MAX_ROWS = 20
MAX_HISTORY = 100_000
"""Maximum number of allocations and frees in a GPU's memory history."""


class TorchTrace:
    """Tool that writes a Chrome trace, and the costliest operations as text and JSON."""

    listener: Listener | None = record_function

    def __init__(self) -> None:
        self._profile = create_profile()

    def open(self) -> None:
        """Starts recording, after kernels of earlier steps have ended, so that they are not counted."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.start()

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Stops, writes `<stem>.*` into `scratch`, and returns sections of the page."""
        self.abandon()
        # Exported once, and compressed directly: a second export of the same profile raises "Trace is already saved".
        self._profile.export_chrome_trace(str(scratch / f"{stem}.json.gz"))
        averages = self._profile.key_averages()
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (scratch / f"{stem}-operations.txt").write_text(
            averages.table(sort_by=order, row_limit=MAX_ROWS, max_name_column_width=60)
        )
        rows = costliest_operations(averages)
        (scratch / f"{stem}-operations.json").write_text(strict_json(rows, indent=1) + "\n")
        return [*_operations_sections(rows), *_how_to_open_sections(f"{stem}.json.gz")]

    def abandon(self) -> None:
        """Stops without writing anything, as after an error of the training."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()


class MemoryTimeline:
    """Tool that profiles memory: on GPUs a snapshot with its history, on CPUs a timeline and the largest allocations."""

    listener: Listener | None = record_function

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        # The timeline distinguishes parameters from activations by shapes and stacks.
        self._profile = None if self._on_gpu else create_profile(profile_memory=True, with_stack=True)

    def open(self) -> None:
        """Starts recording allocations."""
        if self._profile is None:
            torch.cuda.memory._record_memory_history(max_entries=MAX_HISTORY)
        else:
            self._profile.start()

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Stops, writes `<stem>.*` into `scratch`, and returns sections of the page."""
        if self._profile is None:
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(str(scratch / f"{stem}.pickle"))
            (scratch / f"{stem}-summary.txt").write_text(torch.cuda.memory_summary())
            self.abandon()
            peak = torch.cuda.max_memory_allocated() / 2**20
            text = f"The most that tensors held at once so far is {peak:,.1f} MiB. {stem}-summary.txt has PyTorch's account."
            instructions = (
                f"Drag {stem}.pickle onto https://docs.pytorch.org/memory_viz: it shows each block and who asked for it."
            )
            return [paragraph(text), heading("How to open it"), paragraph(instructions)]
        self.abandon()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated in favour of the snapshot, which exists only for GPUs
            self._profile.export_memory_timeline(str(scratch / f"{stem}-timeline.html"), device="cpu")
        rows = largest_allocations(self._profile.key_averages())
        (scratch / f"{stem}-allocations.json").write_text(strict_json(rows, indent=1) + "\n")
        return _allocations_sections(rows, f"{stem}-timeline.html")

    def abandon(self) -> None:
        """Stops without writing anything, as after an error of the training."""
        if self._profile is None:
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            self._profile.stop()


def create_profile(**options: Any) -> Any:
    """Creates PyTorch's profiler of the CPU, and the GPU if there is one, with the shapes of inputs."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, record_shapes=True, acc_events=True, **options)


def costliest_operations(averages: Any) -> list[dict[str, Any]]:
    """Returns the operations with the most own time, the device's if there is one, without our phases."""
    rows = [
        {
            "name": average.key,
            "calls": average.count,
            "self_cpu_us": float(average.self_cpu_time_total),
            "self_device_us": float(average.self_device_time_total),
        }
        for average in averages
        if average.device_type == DeviceType.CPU and average.key not in PHASES
    ]
    time_key = "self_device_us" if any(row["self_device_us"] for row in rows) else "self_cpu_us"
    total_us = sum(row[time_key] for row in rows) or 1.0
    rows.sort(key=lambda row: -row[time_key])
    return [row | {"share": row[time_key] / total_us} for row in rows[:MAX_ROWS]]


def largest_allocations(averages: Any) -> list[dict[str, Any]]:
    """Returns the operations that allocated the most memory of their own over the window, in bytes, net of frees."""
    rows = [
        {"name": average.key, "calls": average.count, "self_bytes": int(average.self_cpu_memory_usage)}
        for average in averages
        if average.self_cpu_memory_usage > 0 and average.key not in PHASES
    ]
    return sorted(rows, key=lambda row: -row["self_bytes"])[:MAX_ROWS]


def _operations_sections(rows: list[dict[str, Any]]) -> list[str]:
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
    return [
        heading("Operations"),
        paragraph(text + " Times are their own, without what they call."),
        html_table(head, cells),
    ]


def _how_to_open_sections(trace: str) -> list[str]:
    text = (
        f"Drag {trace} onto https://ui.perfetto.dev, or open it at chrome://tracing. Each row is a thread or a stream of "
        "the device; the ranges step, forward, backward, reduce and update are ours, and what lies below them is PyTorch's."
    )
    return [heading("How to open the trace"), paragraph(text)]


def _allocations_sections(rows: list[dict[str, Any]], timeline: str) -> list[str]:
    parts = [heading("Who takes memory")]
    if rows:
        text = f"{rows[0]['name']} takes the most: {rows[0]['self_bytes'] / 2**20:.2f} MiB over these steps."
        cells = [[row["name"], str(row["calls"]), f"{row['self_bytes'] / 2**20:.3f}"] for row in rows]
        parts += [paragraph(text), html_table(["operation", "calls", "MiB"], cells)]
    text = f"{timeline} opens in a browser: bytes over time, by what they are for (parameters, gradients, activations)."
    return [*parts, heading("How to open the time line"), paragraph(text)]
