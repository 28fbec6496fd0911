"""A wall clock that is wrong, for one process and what it starts: what libfaketime does.

subprocess.run(command, env=os.environ | wrong_clock(tmp_path, -3600))     # an hour behind
"""

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def no_clock() -> str:
    """Why no clock can be wrong here; empty where one can."""
    return "" if shutil.which("cc") else "no C compiler, with which to make a clock that is wrong"


def wrong_clock(folder: Path, seconds: float) -> dict[str, str]:
    """Variables under which a process's clock is so many seconds ahead; below 0: behind."""
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT_S": f"{seconds:.0f}"}
