"""AMD GPUs through amdsmi (part of ROCm): utilisation, memory, power, temperature, energy, each read on its own.

Written from amdsmi's documentation and tested against a mock; it has not run on an AMD GPU yet.

    cards = amd_cards(os.environ.get("HIP_VISIBLE_DEVICES"), max_cards=8)
    cards[0].read()                                       # {"utilization_percentage": 97.0, ...}
"""

from collections.abc import Callable
from typing import Any

from raystride.pipelines.observability.hardware.energy import ENERGY_COUNTER, Card, ErrorKind, Figures


def amd_cards(visible: str | None, max_cards: int) -> list[Card]:
    """Returns the first `max_cards` visible GPUs; `visible` lists numbers, None means all.

    Raises ImportError without amdsmi, and amdsmi's own errors.
    """
    import amdsmi  # type: ignore[import-not-found]

    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    names = (
        [str(index) for index in range(len(handles))] if visible is None else [name.strip() for name in visible.split(",")]
    )
    numbers = [int(name) for name in names[:max_cards] if name.isdigit() and int(name) < len(handles)]
    return [Card(f"gpu_{index}", _build_readings(amdsmi, handles[index]), _classify_error) for index in numbers]


def _classify_error(error: Exception) -> ErrorKind:
    """Returns `lacking` for a figure that is `N/A` or unknown to this version, `later` for an error of the driver."""
    return "lacking" if isinstance(error, AttributeError | KeyError | TypeError | ValueError) else "later"


def _build_readings(smi: Any, card: Any) -> dict[str, Callable[[], Figures]]:
    def read_memory() -> Figures:
        vram = smi.AmdSmiMemoryType.VRAM
        used, total = float(smi.amdsmi_get_gpu_memory_usage(card, vram)), float(smi.amdsmi_get_gpu_memory_total(card, vram))
        return {"memory_usage_megabytes": used / 1e6, "memory_usage_percentage": round(used / total * 100, 1)}

    def read_power() -> Figures:
        info = smi.amdsmi_get_power_info(card)
        now, average = info.get("current_socket_power", "N/A"), info.get("average_socket_power", "N/A")
        return {"power_usage_watts": float(average if now == "N/A" else now)}  # MI300 reports the first, MI200 the second

    def read_temperature() -> Figures:
        sensor, metric = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return {"temperature_celsius": float(smi.amdsmi_get_temp_metric(card, sensor, metric))}

    def read_energy() -> Figures:
        info = smi.amdsmi_get_energy_count(card)
        counted = info["energy_accumulator"] if "energy_accumulator" in info else info["power"]  # its name before ROCm 6
        return {ENERGY_COUNTER: float(counted) * float(info["counter_resolution"]) / 1e6}

    return {
        "utilization": lambda: {"utilization_percentage": float(smi.amdsmi_get_gpu_activity(card)["gfx_activity"])},
        "memory": read_memory,
        "power": read_power,
        "temperature": read_temperature,
        "energy": read_energy,
    }
