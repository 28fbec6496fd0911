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
_HIDDEN = ("", "-1", "NoDevFiles")


def asked() -> dict[str, Any]:
    """What PyTorch says: its `version`, what it was built for, and `count`, `name` and `memory` of GPUs it can use."""
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = torch.cuda.get_device_properties(0) if count else None
    return {
        "version": torch.__version__,
        "built_for": torch.version.cuda or torch.version.hip,
        "said": next((str(each.message).splitlines()[0] for each in said), ""),
        "count": count,
        "name": first.name if first else None,
        "memory": float(first.total_memory) if first else None,
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


_NOTHING: dict[str, Any] = {"name": None, "memory": None}


def problem_with(answer: dict[str, Any], driver_shows: float) -> str:
    """Why PyTorch cannot use GPUs that there are, and what to install; nothing where it can, or there are none."""
    if answer["count"] or not driver_shows or os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return ""
    there = f"there {'is 1 GPU' if driver_shows == 1 else f'are {driver_shows:g} GPUs'}"
    if answer["version"] and not answer["built_for"]:
        return (
            f"{there}, but PyTorch {answer['version']} is built for CPUs alone: install its build for CUDA, with "
            "the command that pytorch.org/get-started gives for this machine"
        )
    said = f" ({answer['said']})" if answer["said"] else ""
    built = f"{answer['version']}, built for CUDA {answer['built_for']}," if answer["built_for"] else ""
    return (
        f"{there}, but PyTorch {built} cannot use {'it' if driver_shows == 1 else 'them'}{said}: update the NVIDIA driver, "
        "or install PyTorch's build for the CUDA that `nvidia-smi` names"
    )
