"""A process that has loaded what tests import, and is forked for each run of pytest, which then starts in half a second.

It loads nothing of ours, which each run takes from its own tree.

    with PytestServer() as server:
        code, lines = server.run(folder, ["-q", "tests/test_architecture.py"], limit_s=60.0)
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = """
import importlib, json, os, signal, sys
for name in ("numpy", "pyarrow", "pytest", "hypothesis", "torch", "torch.distributed", "yaml"):
    importlib.import_module(name)
for line in sys.stdin:
    folder, arguments, output = json.loads(line)
    if (process := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        sys.path.insert(0, folder)
        code = 3
        try:
            code = int(importlib.import_module("pytest").main(arguments))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(process, flush=True)
    _, status = os.waitpid(process, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class PytestServer:
    """Runs pytest in forked processes, one at a time."""

    def __enter__(self) -> "PytestServer":
        # conftest sets what is read when PyTorch is imported, which has happened when it comes to that. A program in the
        # background may ignore SIGINT, which tests would inherit that wait for an interrupted training.
        others = ("PYTHONPATH", "PYTEST_ADDOPTS")
        environment = {name: value for name, value in os.environ.items() if name not in others} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM]
        self._process: Any = subprocess.Popen(
            command, env=environment, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, folder: Path, arguments: list[str], limit_s: float) -> tuple[int | None, list[str]]:
        """pytest's exit code in a tree, None where it hangs, and what it printed. What it started ends with it."""
        with tempfile.NamedTemporaryFile("r") as output:
            self._process.stdin.write(json.dumps([str(folder), arguments, output.name]) + "\n")
            process = int(self._process.stdout.readline())
            done, _, _ = select.select([self._process.stdout], [], [], limit_s)
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            code = int(self._process.stdout.readline())
            return (code if done else None), output.read().splitlines()
