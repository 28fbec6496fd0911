"""Checks whether PyTorch can use the GPUs that the driver shows: the build may be CPU-only, or the driver too old for it.

query_torch()                                             # in this process, which then holds a CUDA context
query_torch_in_subprocess()                               # in a new process: this one stays without CUDA
diagnose_torch_gpus(query_torch(), driver_gpus=2)         # "" or the reason, and what to install
"""

import inspect
import json
import os
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120
MIN_DRIVER = {"11": 450, "12": 525, "13": 580}
"""Minimum driver version by CUDA major version (NVIDIA, CUDA Compatibility, minor version compatibility, table 1)."""
OLDER_INDEX = "https://download.pytorch.org/whl/cu126"
"""PyTorch's package index of builds for CUDA 12.6."""
_HIDDEN_VALUES = ("", "-1", "NoDevFiles")


def query_torch() -> dict[str, Any]:
    """Returns PyTorch's `version`, the CUDA or ROCm it is built for, and `count`, `name`, `memory` of the usable GPUs.

    `driver` is the version of NVIDIA's driver, empty if there is none.
    """
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = torch.cuda.get_device_properties(0) if count else None
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # ImportError, NVMLError: there is none
        driver = ""
    return {
        "version": torch.__version__,
        "built_for": torch.version.cuda or torch.version.hip,
        "said": next((str(warning.message).splitlines()[0] for warning in caught), ""),
        "count": count,
        "name": first.name if first else None,
        "memory": float(first.total_memory) if first else None,
        "driver": driver,
    }


def query_torch_in_subprocess() -> dict[str, Any]:
    """Queries PyTorch in a subprocess about all GPUs of this machine, including those hidden from this process.

    Otherwise CUDA would stay initialised in this process, which may become a worker that sees other devices.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    program = f"import json\nfrom typing import Any\n{inspect.getsource(query_torch)}\nprint(json.dumps(query_torch()))"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"version": "", "built_for": None, "said": f"PyTorch does not answer: {error}", "count": 0} | _NO_GPU
    return found


_NO_GPU: dict[str, Any] = {"name": None, "memory": None, "driver": ""}


def diagnose_torch_gpus(answer: dict[str, Any], driver_gpus: float) -> str:
    """Returns why PyTorch cannot use the existing GPUs and what to install; empty if it can, or if there are none."""
    if answer["count"] or not driver_gpus or os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN_VALUES:
        return ""
    gpus_text = f"there {'is 1 GPU' if driver_gpus == 1 else f'are {driver_gpus:g} GPUs'}"
    driver = answer.get("driver", "")
    if answer["version"] and not answer["built_for"]:
        return (
            f"{gpus_text}, but PyTorch {answer['version']} is built for CPUs alone: install its build for CUDA, "
            f"{_install_command(answer['version'], driver)}"
        )
    said = f" ({answer['said']})" if answer["said"] else ""
    built = f"{answer['version']}, built for CUDA {answer['built_for']}," if answer["built_for"] else ""
    failure = f"{gpus_text}, but PyTorch {built} cannot use {'it' if driver_gpus == 1 else 'them'}{said}"
    needed = MIN_DRIVER.get(str(answer["built_for"]).split(".")[0], 0)
    if driver and _major_version(driver) < needed:
        return (
            f"{failure}: update the NVIDIA driver, which is {driver}, to {needed} or newer, or install PyTorch's build for "
            f"CUDA 12, {_install_command(answer['version'], driver)}"
        )
    return f"{failure}: update the NVIDIA driver, or install PyTorch's build for the CUDA that `nvidia-smi` names"


def _install_command(version: str, driver: str) -> str:
    """Returns the pip command for this driver; see docs/gpus.md."""
    plain = version.split("+")[0]
    index = f" --index-url {OLDER_INDEX}" if driver and _major_version(driver) < MIN_DRIVER["13"] else ""
    return f"pip install --force-reinstall torch=={plain}{index} (docs/gpus.md)"


def _major_version(driver: str) -> int:
    number = driver.split(".")[0]
    return int(number) if number.isdigit() else 0
