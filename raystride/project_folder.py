"""The working folder on `sys.path`, so that none of a user's files stands for a library by its name alone.

A command puts the folder behind all that is installed, in its own process and in Ray's workers: plug-ins are found, and a
folder `tokenizers/` hides nothing. A script's folder is rightly the first, so a file in it that hides a library is refused.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = frozenset({
    "IPython", "PIL", "alembic", "amdsmi", "cryptography", "datasets", "datasketch", "deepspeed", "fastapi", "fsspec",
    "huggingface_hub", "jinja2", "jsonargparse", "matplotlib", "mlflow", "numpy", "nvtx", "onnx", "onnxscript", "optuna",
    "pandas", "psutil", "py3langid", "pyarrow", "pynvml", "ray", "rich", "sacrebleu", "safetensors", "scipy", "shtab",
    "sklearn", "sqlalchemy", "tiktoken", "tokenizers", "torch", "torchmetrics", "transformers", "triton",
    "typing_extensions", "uvicorn", "yaml",
})  # fmt: skip
"""All that the product imports."""
METADATA = {"raystride.working_folder": "last"}
"""Tells Ray's workers that their driver is a command."""

_is_last = False


def put_working_folder_last() -> None:
    """Moves the working folder, which `python -m` puts first and a command's script leaves out, to the end of `sys.path`.

    It stays where Raystride itself lies in it, as in a clone that is not installed.
    """
    global _is_last
    here = os.getcwd()
    if Path(__file__).parents[1] == Path(here):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return
    if sys.path and sys.path[0] in ("", here):
        del sys.path[0]
    if "" not in sys.path:
        sys.path.append("")
    _is_last = True


def job_metadata() -> dict[str, str]:
    """Returns what Ray's workers need to know of this process's `sys.path`, for the metadata of Ray's job."""
    return METADATA if _is_last else {}


def put_last_in_worker() -> None:
    """Moves the folders that Ray has put before all others to the end of `sys.path`, in a worker of a command."""
    ray_worker = sys.modules.get("ray._private.worker")
    if ray_worker is None or ray_worker.global_worker.mode != ray_worker.WORKER_MODE:
        return
    job = ray_worker.global_worker.core_worker.get_job_config()
    if METADATA.items() <= dict(job.metadata).items():
        driver_folders = set(job.py_driver_sys_path)
        sys.path.sort(key=driver_folders.__contains__)


def find_hidden_library() -> tuple[str, str] | None:
    """Returns the name of an installed library that a file of the script's or working folder hides, and that file."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    users = {os.path.realpath(folder) for folder in ("", os.path.dirname(script or "."))}
    users &= {os.path.realpath(entry) for entry in sys.path if os.path.isdir(entry or ".")}
    others = [entry for entry in sys.path if os.path.realpath(entry) not in users]
    for name in sorted(LIBRARIES & {entry.partition(".")[0] for folder in users for entry in os.listdir(folder)}):
        found = find_spec(name)
        origin = Path(os.path.realpath(found.origin)) if found and found.origin else None
        if origin and str(origin.parents[origin.name == "__init__.py"]) in users and PathFinder.find_spec(name, others):
            return name, str(origin)
    return None
