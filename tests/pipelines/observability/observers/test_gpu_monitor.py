"""GPUs that are played: NVML is a small C library that reads a script, which pynvml, unchanged, loads in a fresh process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from raystride.pipelines.observability.observers.gpu_monitor import GpuMonitor
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.system import service_thread
from tests.waiting import wait_until

COMPILER = shutil.which("cc") or shutil.which("gcc")

PLAYER = """
import json, os, sys
from pathlib import Path
from raystride.pipelines.observability.observers.gpu_monitor import DeviceSampler, find_devices
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.record.state import run_figures

play = json.load(sys.stdin)
run = RunFacts(run="r", attempt="a1", device="a GPU", node="left", tokens_per_step=100, **play["run"])
script, warnings, sampler, shown = Path(os.environ["SCRIPTED_NVML"]), [], None, []
for frame in play["frames"]:
    script.write_text(frame["script"])
    sampler = sampler or DeviceSampler(find_devices(run, Path("/nowhere"), warnings.append), run, warnings.append)
    shown.append(sampler.sample(frame["time"], frame["steps"], frame.get("last", False)))
print(json.dumps({"shown": shown, "totals": sampler.totals(), "run": run_figures([sampler.totals()]), "warnings": warnings}))
"""

THREAD = """
import json, os, sys, threading, time
from pathlib import Path
from raystride.pipelines.observability.observers import gpu_monitor
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.record.sender import Sender
from tests.receipts import taken

gpu_monitor.LAST_READING_S = 0.3
entries = []
def post(name, posted, recorder, urgent):
    entries.extend(posted)
    return taken(posted)
sender = Sender(post, "node", interval_s=0.02)
monitor = gpu_monitor.GpuMonitor(sender, 0.05)
monitor.on_start(RunFacts(run="r", attempt="a1", device="a GPU", node="left", nodes=2, world=2, tokens_per_step=100))
wanted = int(sys.stdin.read() or 0)
while len([entry for entry in entries if entry["kind"] == "system"]) < wanted:
    time.sleep(0.01)
for step in range(1, 6):
    monitor.on_step(step)
monitor.on_end({})
sender.close()
print(json.dumps({"entries": entries, "threads": [thread.name for thread in threading.enumerate()]}))
"""

CARD: dict[str, Any] = {
    "uuid": "GPU-aa00",
    "utilization": "97 40",
    "memory": f"{20 * 10**9} {80 * 10**9}",
    "temperature": 61,
    "power": 300_000,
    "limit": 700_000,
    "energy": 1_000_000,
    "clock1": 1980,
    "clock2": 2619,
    "reasons": 0,
    "pcie0": 1500,
    "pcie1": 2500,
    "ecc0": 3,
    "ecc1": 0,
    "processes": 2,
}


def script(*cards: dict[str, Any]) -> str:
    """A script of cards by their figures; a figure that is None is left out."""
    lines = [f"* cards {len(cards)}"]
    lines += [f"{n} {name} {value}" for n, card in enumerate(cards) for name, value in card.items() if value is not None]
    return "\n".join(lines) + "\n"


def frame(at: float, steps: int, *cards: dict[str, Any], last: bool = False) -> dict[str, Any]:
    """State of the cards at a time and after a number of steps."""
    return {"time": at, "steps": steps, "script": script(*cards), "last": last}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the fake NVML library."""
    if COMPILER is None:
        pytest.skip("no C compiler (cc, gcc) to build the library that plays NVML")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("scripted_nvml.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def run_beside(library: Path, program: str, given: str = "", visible: str | None = None) -> Any:
    """Runs a program with the fake NVML library; returns its JSON output."""
    surroundings = os.environ | {"LD_LIBRARY_PATH": str(library), "SCRIPTED_NVML": str(library / "script")}
    surroundings.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        surroundings["CUDA_VISIBLE_DEVICES"] = visible
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def play(library: Path, *frames: dict[str, Any], visible: str | None = None, **run: Any) -> Any:
    """Reads the cards at every frame: the figures `shown`, then `totals`, the `run`'s figures and `warnings`."""
    given = json.dumps({"frames": frames, "run": {"world": 8, **run}})
    return run_beside(library, PLAYER, given, visible)


def test_two_cards_tell_everything_and_what_a_token_costs(library: Path) -> None:
    def cards(energy: int, other: int) -> list[dict[str, Any]]:
        return [CARD | {"energy": energy}, CARD | {"energy": other, "utilization": "3 0"}]

    played = play(library, frame(100.0, 0, *cards(10_000, 5_000)), frame(105.0, 20, *cards(2_010_000, 505_000)))
    shown = played["shown"][1]
    assert {name: value for name, value in shown.items() if name.startswith("gpu_0_")} == {
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_utilization_percentage": 40.0,
        "gpu_0_memory_usage_megabytes": 20_000.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_power_usage_watts": 300.0,
        "gpu_0_power_usage_percentage": 42.9,
        "gpu_0_energy_joules": 2000.0,
        "gpu_0_temperature_celsius": 61.0,
        "gpu_0_sm_clock_megahertz": 1980.0,
        "gpu_0_memory_clock_megahertz": 2619.0,
        "gpu_0_clocks_event_reasons": 0.0,
        "gpu_0_throttled_seconds": 0.0,
        "gpu_0_pcie_transmit_megabytes_per_second": 1.5,
        "gpu_0_pcie_receive_megabytes_per_second": 2.5,
        "gpu_0_ecc_corrected_errors": 3.0,
        "gpu_0_ecc_uncorrected_errors": 0.0,
        "gpu_0_processes": 2.0,
    }
    assert played["run"] == {
        "energy_joules": 2500.0,
        "energy_covers": "GPUs",
        "joules_per_token": 2500 / 2000,
        "average_power_watts": 500.0,
        "throttled_seconds": 0.0,
        "throttled_seconds_by_reason": {},
        "gpu_idle_share": 0.5,
    }
    assert shown["joules_per_token"] == 1.25
    assert played["warnings"] == []


def test_a_card_without_a_counter_has_its_power_integrated_by_trapezoids(library: Path) -> None:
    def card(watts: int | str) -> dict[str, Any]:
        return CARD | {"energy": None, "power": watts}

    powers: list[tuple[float, int, int | str]] = [(0.0, 0, 100_000), (2.0, 1, 300_000), (4.0, 2, "!999"), (6.0, 4, 500_000)]
    played = play(library, *(frame(at, steps, card(watts)) for at, steps, watts in powers))
    assert "gpu_0_power_usage_watts" not in played["shown"][2]
    assert played["run"]["energy_joules"] == 2 * (100 + 300) / 2 + 4 * (300 + 500) / 2
    assert played["run"]["joules_per_token"] == 2000 / 400


def test_what_a_card_lacks_or_fails_once_takes_nothing_else_with_it(library: Path) -> None:
    bare = CARD | {"temperature": None, "energy": None, "power": None, "reasons": None}
    failing = bare | {"utilization": "!999", "clock1": "!10"}
    played = play(library, frame(0, 0, bare), frame(5, 1, failing), frame(10, 2, bare | {"temperature": 50}))
    first, second, third = (set(shown) for shown in played["shown"])
    assert first - second == {
        "gpu_0_utilization_percentage",
        "gpu_0_memory_utilization_percentage",
        "gpu_0_sm_clock_megahertz",
    }
    assert third - {"gpu_idle_share"} == first  # the temperature, lacking at the start, is not asked for again
    assert len(first) == 11
    assert played["run"] == {"gpu_idle_share": 0.0}
    assert played["warnings"] == []


def test_a_card_that_falls_off_the_bus_is_said_once_and_the_other_goes_on(library: Path) -> None:
    lost = CARD | {"lost": 1}
    frames = [frame(0, 0, CARD, CARD), frame(5, 1, CARD, lost), frame(10, 2, CARD | {"energy": 1_500_000}, lost)]
    played = play(library, *frames)
    assert not [name for name in played["shown"][2] if name.startswith("gpu_1_")]
    assert played["shown"][2]["gpu_0_energy_joules"] == 500.0
    (warning,) = played["warnings"]
    assert "gpu_1 of left is lost (GPU is lost)" in warning
    assert "joules_per_token" not in played["run"]  # of one card alone it would pass for that of both
    assert played["run"]["gpu_idle_share"] == 0.0


def test_seconds_throttled_go_by_the_time_between_readings(library: Path) -> None:
    bits = [(0.0, 0x4), (2.0, 0x4 | 0x20), (5.0, 0x1), (9.0, 0x2), (10.5, 0x4)]  # idling and chosen clocks do not count
    played = play(library, *(frame(at, 0, CARD | {"reasons": reasons}) for at, reasons in bits))
    assert played["run"]["throttled_seconds"] == 2.0 + 1.5
    assert played["run"]["throttled_seconds_by_reason"] == {"sw_power_cap": 3.5, "sw_thermal": 2.0}
    assert played["shown"][4]["gpu_0_throttled_sw_power_cap_seconds"] == 3.5


def test_seconds_throttled_go_by_the_cards_own_counters_where_it_has_them(library: Path) -> None:
    def card(cap: float, heat: float | str) -> dict[str, Any]:
        heat = heat if isinstance(heat, str) else int(heat * 1e9)
        return CARD | {"reasons": 0x4 | 0x8, "field74": int(cap * 1e9), "field75": heat}

    readings = [(0.0, card(7, 1)), (2.0, card(7.5, 1)), (4.0, card(8, "!999")), (6.0, card(8, 1.25))]
    played = play(library, *(frame(at, 0, shown) for at, shown in readings))
    # The hardware's slowdown has no counter and goes by its bit; no interval counts more than it lasted.
    by_reason = {"sw_power_cap": 1.0, "sw_thermal": 0.25, "hw_slowdown": 6.0}
    assert played["run"]["throttled_seconds_by_reason"] == by_reason
    assert played["run"]["throttled_seconds"] == 6.0


SLICED = [
    {"uuid": "GPU-aa00"},
    {"uuid": "GPU-ab11"},
    {"uuid": "GPU-cc22"},
    {"uuid": "GPU-dd33"},
]


@pytest.mark.parametrize(
    ("visible", "world", "cards"),
    [
        (None, 8, [0, 1, 2, 3]),
        (None, 2, [0, 1]),
        ("", 8, []),
        ("-1", 8, []),
        ("2,0", 8, [2, 0]),
        ("2,0,1", 1, [2]),
        ("0,7,1", 8, [0]),
        ("GPU-cc22,GPU-ab", 8, [2, 1]),
        ("GPU-a,2", 8, []),  # not one card's beginning alone
        ("MIG-01,MIG-02", 8, [2]),
        ("MIG-03", 8, [3]),
        ("MIG-GPU-ab11/1/0", 8, [1]),
        ("MIG-99", 8, []),
    ],
)
def test_only_the_cards_that_the_run_uses_are_read(
    library: Path, visible: str | None, world: int, cards: list[int], shared_answers: dict[Any, Any]
) -> None:
    assert shared_answers[f"{visible}/{world}"] == cards


@pytest.fixture(scope="module")
def shared_answers(library: Path) -> Any:
    """The cards for every visible list of the test above, asked in one process."""
    slices = "108 uuid MIG-0101\n111 uuid MIG-0202\n113 uuid MIG-0303\n"  # cards 2, 2 and 3; with gaps
    (library / "script").write_text(script(*SLICED) + slices)
    (mark,) = test_only_the_cards_that_the_run_uses_are_read.pytestmark
    asked = [(visible, world) for visible, world, _ in mark.args[1]]
    program = """
import json, sys, pynvml
from raystride.pipelines.observability.hardware.nvml import visible_indices
pynvml.nvmlInit()
print(json.dumps({f"{visible}/{most}": visible_indices(pynvml, visible, most) for visible, most in json.load(sys.stdin)}))
"""
    return run_beside(library, program, json.dumps(asked))


def test_a_sliced_card_is_read_whole(library: Path) -> None:
    whole = CARD | {"utilization": None}
    first = frame(0, 0, CARD, whole)
    first["script"] += "105 uuid MIG-0101\n"
    played = play(library, first, visible="MIG-0101", world=1)
    assert played["shown"][0]["gpu_1_power_usage_watts"] == 300.0
    assert not [name for name in played["shown"][0] if name.startswith("gpu_0_") or "utilization" in name]


def test_the_names_are_mlflows_own(library: Path) -> None:
    program = """
import importlib.util, json, sys, types
from pathlib import Path
folder = Path(importlib.util.find_spec("mlflow").origin).parent  # its packages without what they import, which takes seconds
for name in ("mlflow", "mlflow.system_metrics", "mlflow.system_metrics.metrics"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
theirs = GPUMonitor()
theirs.collect_metrics()
print(json.dumps(theirs.aggregate_metrics()))
"""
    (library / "script").write_text(script(CARD))
    theirs = run_beside(library, program)
    assert len(theirs) == 5
    ours = play(library, frame(0, 0, CARD))["shown"][0]
    assert {name: ours[name] for name in theirs} == theirs


def test_the_thread_reads_until_the_end_and_sends_with_the_nodes_name(library: Path) -> None:
    (library / "script").write_text(script(CARD, CARD))
    ran = run_beside(library, THREAD, "3")
    kinds = {entry["kind"] for entry in ran["entries"]}
    assert kinds == {"system", "totals"}
    assert ran["threads"] == ["MainThread"]
    readings = [entry["values"] for entry in ran["entries"] if entry["kind"] == "system"]
    assert len(readings) >= 3
    assert readings[0]["system/left/gpu_1_utilization_percentage"] == 97.0
    totals = ran["entries"][-1]["values"]
    assert totals["tokens"] == 500
    assert totals["nodes"] == 2
    assert totals["source"].startswith("node.")


def test_a_driver_that_hangs_holds_up_nothing(library: Path) -> None:
    (library / "script").write_text("* init hang\n")
    ran = run_beside(library, THREAD)
    assert ran["threads"] == ["MainThread", "gpu-monitor"], "nobody has waited for it, neither at the start nor at the end"
    (entry,) = ran["entries"]
    assert "did not answer" in entry["values"]["text"]


def test_without_a_driver_a_warning_says_so_and_nothing_is_read(library: Path) -> None:
    (library / "script").write_text("* init !9\n")
    ran = run_beside(library, THREAD)
    (entry,) = ran["entries"]
    assert "the GPUs of left are not watched (NVMLError_DriverNotLoaded" in entry["values"]["text"]


def test_an_error_is_said_once_and_the_next_readings_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "1000"), ("energy_uj", "1")):
        (package / name).write_text(text)
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.01)

    class FailingSender:
        """A sender that fails twice, and then takes entries."""

        name, failures = "node.1", 2
        sent: ClassVar[list[Any]] = []
        warnings: ClassVar[list[str]] = []

        def put(self, entry: Any) -> None:
            if self.failures:
                self.failures -= 1
                raise KeyError("word")
            self.sent.append(entry)

        def warn(self, text: str) -> None:
            self.warnings.append(text)

    sender: Any = FailingSender()
    monitor = GpuMonitor(sender, 0.01, tmp_path)
    monitor.on_start(RunFacts(run="r", attempt="a1", device="cpu"))
    wait_until(lambda: len(sender.sent) >= 2, "a reading")
    monitor.on_end({})
    assert sender.warnings == ["gpu-monitor: KeyError: 'word'; tried again"]


def test_only_the_first_worker_of_a_node_reads_and_a_step_costs_nothing() -> None:
    sender: Any = None  # never used
    monitor = GpuMonitor(sender, 0.01)
    monitor.on_start(RunFacts(run="r", attempt="a1", rank=3, local_rank=1))
    assert monitor._thread is None
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    monitor.on_step(1)
    sys.setprofile(None)
    assert called == ["on_step"]
    monitor.on_end({})
