"""A machine with other work on it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cores() -> Iterator[None]:
    """Has a process a core compute in bursts."""
    burst = """import time
while True:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    time.sleep(0.02)"""
    processes = [subprocess.Popen([sys.executable, "-c", burst]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
