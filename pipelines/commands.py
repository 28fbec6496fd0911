"""Commands that are printed to be pasted: quoted for the shell, and started by what works where the user is.

pasted("evaluate", "my run", "/runs", "--split test")    # raystride evaluate --run 'my run' --storage /runs --split test
"""

import os
import sys
from functools import cache
from shlex import quote
from shutil import which


@cache
def program() -> str:
    """What starts a job: the installed command where a shell finds it, else this Python."""
    return "raystride" if which("raystride") else f"{quote(sys.executable)} -m raystride"


def pasted(word: str, run: str = "", storage: str = "", more: str = "") -> str:
    """A job's command; `more` stands as it is. A storage is left out that is the default one, `runs` in this folder."""
    given = [program(), word, f"--run {quote(run)}" if run else "", of_storage(storage), more]
    return " ".join(part for part in given if part)


def of_storage(storage: str) -> str:
    """The flag that names a storage, by its absolute path or URI; nothing where that is the default."""
    return f"--storage {quote(storage)}" if storage and storage != os.path.abspath("runs") else ""
