"""Runs a node's part of a deployment: words that do not move, for files that `raystride deploy` writes and users keep.

python -m raystride node slurm --requeues 100 -- train --config settings.yaml     # the batch script of a Slurm job
python -m raystride node wait --nodes 4 --seconds 1800        # until so many nodes have joined
python -m raystride node address 10.0.0.1                     # this node's address on the interface towards another
python -m raystride node before-end --head --seconds 120      # saves before a pod or a machine ends
python -m raystride node end FOLDER                           # ends what `RAYSTRIDE_OWN_RAY=FOLDER ray start` left
"""

import sys
from collections.abc import Sequence
from importlib import import_module

WORDS = {
    "slurm": "launch.deploy.slurm:main",
    "wait": "launch.cluster.wait_for_nodes:main",
    "address": "launch.deploy.own_ray:print_address",
    "before-end": "launch.deploy.before_end:main",
    "end": "launch.deploy.own_ray:main",
}
"""Functions of `pipelines` by word; each takes the words after it and returns an exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 2 for an unknown word."""
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word not in WORDS:
        wants_help = word in ("-h", "--help")
        print(f"usage: raystride node {'|'.join(WORDS)} ...\n\n{__doc__}", file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    module, function = WORDS[word].split(":")
    return int(getattr(import_module(f"raystride.pipelines.{module}"), function)(rest))
