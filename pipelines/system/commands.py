"""Shell commands that are printed for users to paste, quoted, and with a program that their shell finds.

shell_command("evaluate", "my run", "/runs", "--split test")
# raystride evaluate --run 'my run' --storage /runs --split test
"""

import os
import sys
from functools import cache
from shlex import quote
from shutil import which


@cache
def launch_command() -> str:
    """Returns the installed command if it is on the path, else `PYTHON -m raystride`."""
    return "raystride" if which("raystride") else f"{quote(sys.executable)} -m raystride"


def shell_command(word: str, run: str = "", storage: str = "", more: str = "") -> str:
    """Returns a job's command, with `more` appended unquoted. The default storage, `runs` in this folder, is left out."""
    given = [launch_command(), word, f"--run {quote(run)}" if run else "", storage_flag(storage), more]
    return " ".join(part for part in given if part)


def storage_flag(storage: str) -> str:
    """Returns the flag for a storage, an absolute path or URI; "" for the default one."""
    return f"--storage {quote(storage)}" if storage and storage != os.path.abspath("runs") else ""
