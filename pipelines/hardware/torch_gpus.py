"""Whether PyTorch can compute on the GPUs that a driver shows: its build may be one for CPUs, or the driver too old for it.

asked()                                                   # in a process that will use them, or has no need of its memory
asked_apart()                                             # in a process of its own: this one is left as it was
problem_with(asked(), driver_shows=2)                     # "" or why not, and what to install
"""

import inspect
import json
import os
import subprocess
import sys
from typing import Any

LIMIT_S = 120
LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""Driver that programs for this CUDA need at least (NVIDIA, CUDA Compatibility, minor version compatibility, table 1)."""
OLDER_INDEX = "https://download.pytorch.org/whl/cu126"
"""PyTorch's own index of builds for CUDA 12.6."""
_HIDDEN = ("", "-1", "NoDevFiles")


def asked() -> dict[str, Any]:
    """What PyTorch says: its `version`, what it was built for, and `count`, `name` and `memory` of GPUs it can use.

    `driver` is the version of NVIDIA's, empty where there is none.
    """
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as said:
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
        "said": next((str(each.message).splitlines()[0] for each in said), ""),
        "count": count,
        "name": first.name if first else None,
        "memory": float(first.total_memory) if first else None,
        "driver": driver,
    }


def asked_apart() -> dict[str, Any]:
    """What PyTorch says in a process of its own of all GPUs of this machine, whatever is hidden from this process.

    CUDA would else stay in this process, which may become a worker that sees other devices.
    """
    surroundings = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    program = f"import json\nfrom typing import Any\n{inspect.getsource(asked)}\nprint(json.dumps(asked()))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], env=surroundings, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"version": "", "built_for": None, "said": f"PyTorch does not answer: {error}", "count": 0} | _NOTHING
    return found


_NOTHING: dict[str, Any] = {"name": None, "memory": None, "driver": ""}


def problem_with(answer: dict[str, Any], driver_shows: float) -> str:
    """Why PyTorch cannot use GPUs that there are, and what to install; nothing where it can, or there are none."""
    if answer["count"] or not driver_shows or os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return ""
    there = f"there {'is 1 GPU' if driver_shows == 1 else f'are {driver_shows:g} GPUs'}"
    driver = answer.get("driver", "")
    if answer["version"] and not answer["built_for"]:
        return (
            f"{there}, but PyTorch {answer['version']} is built for CPUs alone: install its build for CUDA, "
            f"{_install(answer['version'], driver)}"
        )
    said = f" ({answer['said']})" if answer["said"] else ""
    built = f"{answer['version']}, built for CUDA {answer['built_for']}," if answer["built_for"] else ""
    cannot = f"{there}, but PyTorch {built} cannot use {'it' if driver_shows == 1 else 'them'}{said}"
    needs = LEAST_DRIVER.get(str(answer["built_for"]).split(".")[0], 0)
    if driver and _major(driver) < needs:
        return (
            f"{cannot}: update the NVIDIA driver, which is {driver}, to {needs} or newer, or install PyTorch's build for "
            f"CUDA 12, {_install(answer['version'], driver)}"
        )
    return f"{cannot}: update the NVIDIA driver, or install PyTorch's build for the CUDA that `nvidia-smi` names"


def _install(version: str, driver: str) -> str:
    """The command for this driver; see docs/gpus.md."""
    plain = version.split("+")[0]
    index = f" --index-url {OLDER_INDEX}" if driver and _major(driver) < LEAST_DRIVER["13"] else ""
    return f"pip install --force-reinstall torch=={plain}{index} (docs/gpus.md)"


def _major(driver: str) -> int:
    number = driver.split(".")[0]
    return int(number) if number.isdigit() else 0
