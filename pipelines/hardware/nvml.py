"""NVIDIA's GPUs as NVML shows them: which of them this process may use, and every figure of a card, each read alone.

Names and units are those of MLflow's own monitor where it has the figure, megabytes of 10^6 bytes as there. MIG slices share
a card's power, clocks and temperature: the card is what is read, neighbours on its other slices included. Numbers in
CUDA_VISIBLE_DEVICES are taken in the order of the PCI bus, CUDA's own order wherever a node's cards are alike.

    cards = nvidia_cards(os.environ.get("CUDA_VISIBLE_DEVICES"), most=8)
    cards[0].name, cards[0].read()                        # "gpu_0", {"utilization_percentage": 97.0, ...}
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from raystride.pipelines.hardware.energy import COUNTER, REASONS, Card, Figures, Verdict

COUNTERS = {"sw_power_cap": 74, "sw_thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""NVML's fields that count the nanoseconds for which a reason held, by its name in `THROTTLING`.

Newer ones tell the hardware's slowdowns as well, but their numbers have meant other figures in drivers before.
"""


def nvidia_cards(visible: str | None, most: int) -> list[Card]:
    """The physical GPUs behind the first `most` visible devices; `visible` is as CUDA_VISIBLE_DEVICES says, None all.

    Raises ImportError without nvidia-ml-py, pynvml.NVMLError where there is no driver.
    """
    import pynvml as nvml

    nvml.nvmlInit()
    indices = visible_indices(nvml, visible, most)
    return [Card(f"gpu_{index}", _readings(nvml, index), partial(_judge, nvml)) for index in indices]


def visible_indices(nvml: Any, visible: str | None, most: int) -> list[int]:
    """NVML's numbers of the cards that CUDA shows, in its order; like CUDA it stops at the first name that is none."""
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        return list(range(min(count, most)))
    indices: list[int] = []
    for name in [part.strip() for part in visible.split(",")][:most]:
        index = _index(nvml, name, count)
        if index is None:
            break
        indices.append(index)
    return list(dict.fromkeys(indices))  # two slices of a card are one card


def _index(nvml: Any, name: str, count: int) -> int | None:
    """The card that a number, a UUID or its beginning, or the UUID of one of its MIG slices names."""
    if name.isdigit():
        return int(name) if int(name) < count else None
    slice_of = name.removeprefix("MIG-").partition("/")[0] if name.startswith("MIG-GPU-") else name
    if slice_of.startswith("GPU-"):
        found = [index for index in range(count) if any(uuid.startswith(slice_of) for uuid in _uuids(nvml, index, False))]
    elif name.startswith("MIG-"):
        found = [index for index in range(count) if any(uuid.startswith(name) for uuid in _uuids(nvml, index, True))]
    else:
        return None
    return found[0] if len(found) == 1 else None


def _uuids(nvml: Any, index: int, slices: bool) -> list[str]:
    """The card's UUID, or those of its MIG slices; none of a card that does not answer."""
    try:
        card = nvml.nvmlDeviceGetHandleByIndex(index)
        if not slices:
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


def _judge(nvml: Any, error: Exception) -> Verdict:
    """What an error of a reading means: those that never change are told from those that may pass."""
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


def _readings(nvml: Any, index: int) -> dict[str, Callable[[], Figures]]:
    """Every reading of a card."""

    @cache  # not of a failure, so a card that does not answer at first is asked again
    def card() -> Any:
        return nvml.nvmlDeviceGetHandleByIndex(index)

    def memory() -> Figures:
        held = nvml.nvmlDeviceGetMemoryInfo(card())
        percentage = round(held.used / held.total * 100, 1)
        return {"memory_usage_megabytes": held.used / 1e6, "memory_usage_percentage": percentage}

    def utilization() -> Figures:
        busy = nvml.nvmlDeviceGetUtilizationRates(card())
        return {"utilization_percentage": float(busy.gpu), "memory_utilization_percentage": float(busy.memory)}

    def power_share() -> Figures:
        drawn, limit = nvml.nvmlDeviceGetPowerUsage(card()), nvml.nvmlDeviceGetEnforcedPowerLimit(card())
        return {"power_usage_percentage": round(drawn / limit * 100, 1)}

    def one(name: str, call: Callable[..., Any], *arguments: Any, unit: float = 1.0) -> Callable[[], Figures]:
        return lambda: {name: call(card(), *arguments) / unit}

    megabytes = {"unit": 1e3}  # of the kilobytes in which NVML counts
    volatile = nvml.NVML_VOLATILE_ECC
    return {
        "memory": memory,
        "utilization": utilization,
        "power": one("power_usage_watts", nvml.nvmlDeviceGetPowerUsage, unit=1e3),
        "power share": power_share,
        "energy": one(COUNTER, nvml.nvmlDeviceGetTotalEnergyConsumption, unit=1e3),
        "temperature": one("temperature_celsius", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "sm clock": one("sm_clock_megahertz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory clock": one("memory_clock_megahertz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "reasons": lambda: {REASONS: float(_reasons(nvml, card()))},
        "throttled": lambda: _throttled(nvml, card()),
        "pcie transmit": one(
            "pcie_transmit_megabytes_per_second", nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_TX_BYTES, **megabytes
        ),
        "pcie receive": one(
            "pcie_receive_megabytes_per_second", nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES, **megabytes
        ),
        "ecc corrected": one(
            "ecc_corrected_errors", nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
        ),
        "ecc uncorrected": one(
            "ecc_uncorrected_errors", nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
        ),
        "processes": lambda: {"processes": float(len(nvml.nvmlDeviceGetComputeRunningProcesses(card())))},
    }


def _reasons(nvml: Any, card: Any) -> int:
    """The bits of what limits the clocks; drivers before 535 know the call by its older name alone."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _throttled(nvml: Any, card: Any) -> Figures:
    """Seconds since the driver was loaded for which each reason held, of those that the card counts."""
    fields = nvml.nvmlDeviceGetFieldValues(card, list(COUNTERS.values()))
    counted = {
        f"throttled_counter_{reason}": field.value.ullVal / 1e9
        for reason, field in zip(COUNTERS, fields, strict=True)
        if field.nvmlReturn == nvml.NVML_SUCCESS
    }
    if not counted:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return counted
