"""AMD's GPUs by amdsmi, which comes with ROCm: utilisation, memory, power, temperature, energy, each read alone.

Written after amdsmi's documentation and tested against a stand-in; no AMD GPU has run it yet.

    cards = amd_cards(os.environ.get("HIP_VISIBLE_DEVICES"), most=8)
    cards[0].read()                                       # {"utilization_percentage": 97.0, ...}
"""

from collections.abc import Callable
from typing import Any

from raystride.pipelines.hardware.energy import COUNTER, Card, Figures, Verdict


def amd_cards(visible: str | None, most: int) -> list[Card]:
    """The first `most` visible GPUs; `visible` lists numbers, None means all. Raises ImportError, and what amdsmi raises."""
    import amdsmi  # type: ignore[import-not-found]

    amdsmi.amdsmi_init()
    handles = amdsmi.amdsmi_get_processor_handles()
    names = (
        [str(index) for index in range(len(handles))] if visible is None else [name.strip() for name in visible.split(",")]
    )
    numbers = [int(name) for name in names[:most] if name.isdigit() and int(name) < len(handles)]
    return [Card(f"gpu_{index}", _readings(amdsmi, handles[index]), _judge) for index in numbers]


def _judge(error: Exception) -> Verdict:
    """A figure that is `N/A` or unknown to this version will stay so; what the driver refuses may pass."""
    return "lacking" if isinstance(error, AttributeError | KeyError | TypeError | ValueError) else "later"


def _readings(smi: Any, card: Any) -> dict[str, Callable[[], Figures]]:
    def memory() -> Figures:
        vram = smi.AmdSmiMemoryType.VRAM
        used, total = float(smi.amdsmi_get_gpu_memory_usage(card, vram)), float(smi.amdsmi_get_gpu_memory_total(card, vram))
        return {"memory_usage_megabytes": used / 1e6, "memory_usage_percentage": round(used / total * 100, 1)}

    def power() -> Figures:
        told = smi.amdsmi_get_power_info(card)
        now, average = told.get("current_socket_power", "N/A"), told.get("average_socket_power", "N/A")
        return {"power_usage_watts": float(average if now == "N/A" else now)}  # MI300 tells the one, MI200 the other

    def temperature() -> Figures:
        where, which = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return {"temperature_celsius": float(smi.amdsmi_get_temp_metric(card, where, which))}

    def energy() -> Figures:
        told = smi.amdsmi_get_energy_count(card)
        counted = told["energy_accumulator"] if "energy_accumulator" in told else told["power"]  # its name before ROCm 6
        return {COUNTER: float(counted) * float(told["counter_resolution"]) / 1e6}

    return {
        "utilization": lambda: {"utilization_percentage": float(smi.amdsmi_get_gpu_activity(card)["gfx_activity"])},
        "memory": memory,
        "power": power,
        "temperature": temperature,
        "energy": energy,
    }
