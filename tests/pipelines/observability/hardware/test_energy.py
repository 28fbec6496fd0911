"""Energy without NVIDIA: CPU packages from folders in Linux's layout, and AMD's cards against a mock."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.pipelines.observability.hardware.amd import amd_cards
from raystride.pipelines.observability.hardware.energy import EnergyMeter, rapl_packages
from raystride.pipelines.observability.observers.gpu_monitor import DeviceSampler, find_devices
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.record.state import run_figures


def package(root: Path, name: str, label: str, joules: float, max_joules: float = 100.0) -> Path:
    """Creates a folder in Linux's layout of a CPU's energy counter."""
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (folder / "max_energy_range_uj").write_text(f"{max_joules * 1e6 - 1:.0f}\n")
    return folder


def test_a_run_on_cpus_counts_its_packages_across_the_counters_end(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", "package-0", 90.0)
    second = package(tmp_path, "intel-rapl:1", "package-1", 10.0)
    package(tmp_path, "intel-rapl:0:0", "core", 5.0)
    package(tmp_path, "intel-rapl:2", "psys", 5.0)
    (package(tmp_path, "intel-rapl:3", "package-3", 1.0) / "energy_uj").unlink()
    run = RunFacts(run="r", attempt="a1", tokens_per_step=10)
    warnings: list[str] = []
    sampler = DeviceSampler(find_devices(run, tmp_path, warnings.append), run, warnings.append)
    assert set(sampler.sample(0.0, 0)) == {"cpu_package_0_energy_joules", "cpu_package_1_energy_joules", "energy_joules"}
    (first / "energy_uj").write_text("99000000\n")
    assert sampler.sample(3.0, 1)["cpu_package_0_power_usage_watts"] == 3.0
    (first / "energy_uj").write_text("5000000\n")  # 6 J on: at 100 J it began again
    (second / "energy_uj").write_text("15000000\n")
    sampler.sample(5.0, 4)
    assert run_figures([sampler.totals()]) == {
        "energy_joules": 20.0,
        "energy_covers": "CPU packages",
        "joules_per_token": 0.5,
        "average_power_watts": 4.0,
    }
    assert rapl_packages(tmp_path / "none") == []
    assert not warnings


def test_amd_cards_are_read_where_amdsmi_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a mock that answers as documented; an MI200 reports its average power and no activity."""

    def raise_busy(card: int) -> Any:
        raise OSError("AMDSMI_STATUS_BUSY")

    smi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [7, 8],
        amdsmi_get_gpu_activity=lambda card: {"gfx_activity": "N/A"},
        amdsmi_get_power_info=lambda card: {"current_socket_power": "N/A", "average_socket_power": 250},
        amdsmi_get_gpu_memory_usage=lambda card, kind: 16_000_000_000,
        amdsmi_get_gpu_memory_total=lambda card, kind: 64_000_000_000,
        amdsmi_get_temp_metric=lambda card, where, which: 55,
        amdsmi_get_energy_count=lambda card: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        AmdSmiMemoryType=SimpleNamespace(VRAM=0),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT=1),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT=0),
    )
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    (card,) = amd_cards("1", max_cards=8)
    expected = {
        "memory_usage_megabytes": 16_000.0,
        "memory_usage_percentage": 25.0,
        "power_usage_watts": 250.0,
        "temperature_celsius": 55.0,
        "energy_counter_joules": pytest.approx(30.6),
    }
    assert card.name == "gpu_1"
    assert card.read() == expected
    answers, smi.amdsmi_get_power_info = smi.amdsmi_get_power_info, raise_busy
    assert "power_usage_watts" not in card.read()
    smi.amdsmi_get_power_info = answers
    assert card.read() == expected


def test_a_short_run_says_nothing_on_idling_and_a_reset_counter_takes_nothing_away() -> None:
    meter = EnergyMeter()
    for at, joules in enumerate((50.0, 80.0, 2.0, 5.0)):
        meter.add_reading({"energy_counter_joules": joules, "utilization_percentage": 0.0}, now=float(at), last=at == 3)
    assert meter.joules == 33.0
    assert meter.readings == meter.idle == 2
