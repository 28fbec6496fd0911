"""NVIDIA's compute-sanitizer over every kernel on the real device: `make sanitize`.

memcheck finds out-of-bounds accesses, racecheck hazards in shared memory, initcheck reads of uninitialized memory, synccheck
barriers that not every thread reaches. PyTorch's caching allocator is disabled, since it returns parts of large blocks,
inside which an out-of-bounds access would not be detected.

    python -m benchmarks.kernel_tools.sanitize                          # all four
    python -m benchmarks.kernel_tools.sanitize --tool memcheck
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from raystride.triton_kernels.processes import run_in_group

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NOT_RUN = 3
"""Exit code of the checks, and of this program, if a kernel was not run."""
ROOT = Path(__file__).resolve().parents[2]


def find_sanitizer() -> str | None:
    """Returns the tool on the path, or in the CUDA toolkit."""
    places = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/opt/cuda"]
    return shutil.which("compute-sanitizer") or next(
        (found for place in places if (found := shutil.which("compute-sanitizer", path=f"{place}/bin"))), None
    )


def describe_missing() -> str:
    """Returns the missing prerequisites and their remedy; empty if there are none."""
    import torch

    missing = []
    if not torch.cuda.is_available() or torch.version.hip:
        missing.append("an NVIDIA GPU that PyTorch can see")
    if find_sanitizer() is None:
        missing.append("compute-sanitizer, which comes with the CUDA toolkit (set CUDA_HOME if it is not on the path)")
    return " and ".join(missing)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tools one after the other; returns 1 if one finds something, 3 if they or the kernels cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_tools.sanitize", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only this one; may be repeated")
    given = parser.parse_args(arguments)
    if missing := describe_missing():
        print(f"make sanitize needs {missing}; nothing was run.", file=sys.stderr)
        print("Without a GPU the tests look for the same mistakes with guard bands: make test", file=sys.stderr)
        return 3
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
    failed, not_run = [], []
    for tool in given.tool or TOOLS:
        print(f"compute-sanitizer --tool {tool}: some minutes", flush=True)
        command = [
            str(find_sanitizer()),
            "--tool",
            tool,
            "--error-exitcode",
            "1",
            "--target-processes",
            "all",  # checks run in children
            "--kernel-name",
            "kernel_substring=_kernel",
        ]
        command += [sys.executable, "-m", "raystride.triton_kernels.device_checks", "--quick"]
        code = run_in_group(command, cwd=ROOT, env=environment)
        (failed if code not in (0, NOT_RUN) else not_run if code else []).append(tool)
    if not_run:
        print(f"not run: {', '.join(not_run)}: see above", file=sys.stderr)
    print(f"{', '.join(failed)}: see above" if failed else "nothing found")
    return 1 if failed else NOT_RUN if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
