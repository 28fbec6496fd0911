"""Peak FLOP/s of devices from their data sheets, for model FLOP/s utilisation (MFU).

Figures are dense FLOP/s: if a vendor prints a figure "with sparsity", ours is half of it. `fp32` is the rate outside the
tensor cores, `tf32` and `bf16` the rate of the tensor cores with fp32 accumulation. A device or precision that is not listed
has no peak, hence no MFU: a guess would be worse than nothing.

    peak_flops("NVIDIA H100 80GB HBM3", "bf16")         # 989.4e12
    peak_flops("cpu", "fp32")                           # None
"""

from typing import NamedTuple


class PeakFlops(NamedTuple):
    """Dense peak FLOP/s of a device by precision, and the data sheet that states them."""

    flops: dict[str, float]
    source: str


# The first name contained in the device's name matches, so the longer names of a family come before the shorter.
PEAKS: dict[str, PeakFlops] = {
    "GB200": PeakFlops({"bf16": 2500e12, "tf32": 1250e12, "fp32": 80e12}, "NVIDIA GB200 NVL72 data sheet, one of 72 GPUs"),
    "B200": PeakFlops({"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12}, "NVIDIA DGX B200 data sheet, one of eight GPUs"),
    "H200 NVL": PeakFlops(
        {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}, "NVIDIA H200 Tensor Core GPU data sheet, NVL"
    ),
    "H200": PeakFlops({"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    "H100 NVL": PeakFlops(
        {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}, "NVIDIA H100 Tensor Core GPU data sheet, NVL"
    ),
    "H100 PCIe": PeakFlops(
        {"bf16": 756e12, "tf32": 378e12, "fp32": 51.2e12}, "NVIDIA H100 GPU architecture white paper, PCIe"
    ),
    "H100": PeakFlops(
        {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}, "NVIDIA H100 GPU architecture white paper, SXM5"
    ),
    "A100": PeakFlops({"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}, "NVIDIA A100 Tensor Core GPU data sheet"),
    "A10G": PeakFlops({"bf16": 70e12, "tf32": 35e12, "fp32": 31.52e12}, "NVIDIA A10G data sheet (AWS G5)"),
    "A40": PeakFlops({"bf16": 149.7e12, "tf32": 74.8e12, "fp32": 37.4e12}, "NVIDIA A40 data sheet"),
    "L40S": PeakFlops({"bf16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12}, "NVIDIA L40S data sheet"),
    "L4": PeakFlops({"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12}, "NVIDIA L4 data sheet"),
    "V100-PCIE": PeakFlops({"fp32": 14e12}, "NVIDIA V100 data sheet, PCIe; no bf16"),
    "V100": PeakFlops({"fp32": 15.7e12}, "NVIDIA V100 data sheet, SXM2; no bf16"),
    "T4": PeakFlops({"fp32": 8.1e12}, "NVIDIA T4 data sheet; no bf16"),
    "RTX 4090": PeakFlops(
        {"bf16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12}, "NVIDIA Ada GPU architecture white paper, RTX 4090"
    ),
    "RTX 3090": PeakFlops(
        {"bf16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}, "NVIDIA Ampere GA102 architecture white paper, RTX 3090"
    ),
    "MI300X": PeakFlops({"bf16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12}, "AMD Instinct MI300X data sheet"),
    "MI250X": PeakFlops(
        {"bf16": 191.5e12, "fp32": 23.95e12}, "AMD Instinct MI250X data sheet, one of two dies, as PyTorch sees it"
    ),
}

SLOWER_VARIANTS = frozenset({"laptop", "mobile", "max-q", "d", "mig"})
"""Words in a device's name that mark a slower variant of the data sheet's device, or a slice of it."""


def peak_flops(device: str, precision: str) -> float | None:
    """Returns the dense peak FLOP/s of a device by its name, or None if unknown."""
    if SLOWER_VARIANTS & set(device.lower().split()):
        return None
    for name, peak in PEAKS.items():
        if _matches_name(device, name):
            return peak.flops.get(precision)
    return None


def _matches_name(device: str, name: str) -> bool:
    """Returns whether the device's name has `name` as whole words: `L4` matches `NVIDIA L4`, not `L40S` or `RTX 4090`."""
    words, wanted = device.lower().split(), name.lower().split()
    runs = (words[i : i + len(wanted)] for i in range(len(words)))
    # The last word may continue after a dash: `A100-SXM4-80GB` is an A100.
    return any(run[:-1] == wanted[:-1] and _matches_word(run[-1], wanted[-1]) for run in runs if len(run) == len(wanted))


def _matches_word(word: str, wanted: str) -> bool:
    return word == wanted or word.startswith(f"{wanted}-")
