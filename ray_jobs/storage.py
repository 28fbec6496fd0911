"""Lists what lies in a storage: sizes, newest changes, and the runs that use each."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the raystride beside this script, not the installed one
    import_module("raystride.command").run_script(__file__)
