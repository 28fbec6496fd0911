"""Lists, shows, compares, prunes and audits runs, and brings MLflow up to date with a run's journal.

python ray_jobs/runs.py list --storage runs
python ray_jobs/runs.py compare one two three
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["runs", *sys.argv[1:]]))

from raystride.pipelines.launch.runs import main

__all__ = ["main"]
