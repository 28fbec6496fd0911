"""The name of this machine's CPU.

processor_name()                                          # "AMD EPYC 9654 96-Core Processor"
"""

import platform
from pathlib import Path


def processor_name() -> str | None:
    """Returns the CPU's model name, or None if the system does not report it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None
