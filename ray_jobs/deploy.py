"""The files with which a run goes to Compose, Slurm, Kubernetes or a cloud.

python ray_jobs/deploy.py slurm --config configs/lm_124m.yaml --nodes 4 --gpus-per-node 8 --data.source /shared/text
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["deploy", *sys.argv[1:]]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    from raystride.pipelines.deploy.driver import run_deploy

    return run_deploy(sys.argv[1:] if arguments is None else list(arguments))
