"""NVIDIA GPUs through NVML: the cards visible to this process and all figures of a card, each read on its own.

Names and units follow MLflow's own monitor if it has the figure; a megabyte is 10^6 bytes as there. MIG slices share a
card's power, clocks and temperature: the whole card is read, including the load of its other slices. Numbers in
CUDA_VISIBLE_DEVICES are taken in PCI bus order, which is CUDA's own order if all cards of a node are alike.

    cards = nvidia_cards(os.environ.get("CUDA_VISIBLE_DEVICES"), max_cards=8)
    cards[0].name, cards[0].read()                        # "gpu_0", {"utilization_percentage": 97.0, ...}
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from raystride.pipelines.observability.hardware.energy import CLOCK_REASONS, ENERGY_COUNTER, Card, ErrorKind, Figures

THROTTLE_COUNTER_FIELDS = {"sw_power_cap": 74, "sw_thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""NVML field ids that count the nanoseconds in which a reason was active, by its name in `THROTTLE_BITS`.

Newer fields also report hardware slowdowns, but older drivers used their ids for other figures.
"""


def nvidia_cards(visible: str | None, max_cards: int) -> list[Card]:
    """Returns the physical GPUs of the first `max_cards` visible devices; `visible` is CUDA_VISIBLE_DEVICES, None means all.

    Raises ImportError without nvidia-ml-py, pynvml.NVMLError without a driver.
    """
    import pynvml as nvml

    nvml.nvmlInit()
    indices = visible_indices(nvml, visible, max_cards)
    return [Card(f"gpu_{index}", _build_readings(nvml, index), partial(_classify_error, nvml)) for index in indices]


def visible_indices(nvml: Any, visible: str | None, max_cards: int) -> list[int]:
    """Returns the NVML indices of CUDA's visible devices, in CUDA's order; like CUDA it stops at the first invalid name."""
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        return list(range(min(count, max_cards)))
    indices: list[int] = []
    for name in [part.strip() for part in visible.split(",")][:max_cards]:
        index = _find_card_index(nvml, name, count)
        if index is None:
            break
        indices.append(index)
    return list(dict.fromkeys(indices))  # two slices of a card are one card


def _find_card_index(nvml: Any, name: str, count: int) -> int | None:
    """Returns the index of a card by its number, its UUID or a prefix of that, or the UUID of one of its MIG slices."""
    if name.isdigit():
        return int(name) if int(name) < count else None
    gpu_uuid = name.removeprefix("MIG-").partition("/")[0] if name.startswith("MIG-GPU-") else name
    if gpu_uuid.startswith("GPU-"):
        found = [
            index for index in range(count) if any(uuid.startswith(gpu_uuid) for uuid in _list_uuids(nvml, index, False))
        ]
    elif name.startswith("MIG-"):
        found = [index for index in range(count) if any(uuid.startswith(name) for uuid in _list_uuids(nvml, index, True))]
    else:
        return None
    return found[0] if len(found) == 1 else None


def _list_uuids(nvml: Any, index: int, of_mig_slices: bool) -> list[str]:
    """Returns the card's UUID, or those of its MIG slices; empty if the card does not answer."""
    try:
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        if not of_mig_slices:
            return [str(nvml.nvmlDeviceGetUUID(card))]
        numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(card))
    except nvml.NVMLError:
        return []
    found = []
    for number in numbers:
        try:
            found.append(str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number))))
        except nvml.NVMLError:
            continue  # slices need not be numbered without gaps
    return found


def _classify_error(nvml: Any, error: Exception) -> ErrorKind:
    """Classifies a reading's error: card lost, permanently unsupported (`lacking`) or transient (`later`)."""
    value = getattr(error, "value", None)
    if value == nvml.NVML_ERROR_GPU_IS_LOST:
        return "lost"
    lasting = {
        nvml.NVML_ERROR_INVALID_ARGUMENT,
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_NO_PERMISSION,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
    return "lacking" if value in lasting or not isinstance(error, nvml.NVMLError) else "later"


def _build_readings(nvml: Any, index: int) -> dict[str, Callable[[], Figures]]:
    """Returns all readings of a card by name."""

    @cache  # failures are not cached, so a card that does not answer at first is tried again
    def get_card() -> Any:
        return nvml.nvmlDeviceGetHandleByIndex(index)

    def read_memory() -> Figures:
        memory = nvml.nvmlDeviceGetMemoryInfo(get_card())
        percentage = round(memory.used / memory.total * 100, 1)
        return {"memory_usage_megabytes": memory.used / 1e6, "memory_usage_percentage": percentage}

    def read_utilization() -> Figures:
        rates = nvml.nvmlDeviceGetUtilizationRates(get_card())
        return {"utilization_percentage": float(rates.gpu), "memory_utilization_percentage": float(rates.memory)}

    def read_power_share() -> Figures:
        drawn, limit = nvml.nvmlDeviceGetPowerUsage(get_card()), nvml.nvmlDeviceGetEnforcedPowerLimit(get_card())
        return {"power_usage_percentage": round(drawn / limit * 100, 1)}

    def scaled_reading(name: str, call: Callable[..., Any], *arguments: Any, unit: float = 1.0) -> Callable[[], Figures]:
        return lambda: {name: call(get_card(), *arguments) / unit}

    megabytes = {"unit": 1e3}  # NVML counts kilobytes
    volatile = nvml.NVML_VOLATILE_ECC
    return {
        "memory": read_memory,
        "utilization": read_utilization,
        "power": scaled_reading("power_usage_watts", nvml.nvmlDeviceGetPowerUsage, unit=1e3),
        "power share": read_power_share,
        "energy": scaled_reading(ENERGY_COUNTER, nvml.nvmlDeviceGetTotalEnergyConsumption, unit=1e3),
        "temperature": scaled_reading("temperature_celsius", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "sm clock": scaled_reading("sm_clock_megahertz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory clock": scaled_reading("memory_clock_megahertz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "reasons": lambda: {CLOCK_REASONS: float(_read_clock_reasons(nvml, get_card()))},
        "throttled": lambda: _read_throttle_counters(nvml, get_card()),
        "pcie transmit": scaled_reading(
            "pcie_transmit_megabytes_per_second", nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_TX_BYTES, **megabytes
        ),
        "pcie receive": scaled_reading(
            "pcie_receive_megabytes_per_second", nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES, **megabytes
        ),
        "ecc corrected": scaled_reading(
            "ecc_corrected_errors", nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
        ),
        "ecc uncorrected": scaled_reading(
            "ecc_uncorrected_errors", nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
        ),
        "processes": lambda: {"processes": float(len(nvml.nvmlDeviceGetComputeRunningProcesses(get_card())))},
    }


def _read_clock_reasons(nvml: Any, card: Any) -> int:
    """Returns the bits of the clocks event reasons; drivers before 535 have the call only under its older name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _read_throttle_counters(nvml: Any, card: Any) -> Figures:
    """Returns seconds since the driver was loaded in which each reason was active, for the reasons that the card counts."""
    fields = nvml.nvmlDeviceGetFieldValues(card, list(THROTTLE_COUNTER_FIELDS.values()))
    counted = {
        f"throttled_counter_{reason}": field.value.ullVal / 1e9
        for reason, field in zip(THROTTLE_COUNTER_FIELDS, fields, strict=True)
        if field.nvmlReturn == nvml.NVML_SUCCESS
    }
    if not counted:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return counted
