"""The command `raystride`: each of its words is a job, and what follows is the job's own.

raystride train --config lm_python --train.steps 500
raystride --help
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile

import raystride
from raystride.pipelines.output import protected_output
from raystride.pipelines.signals import report_interruption, signals_raise
from raystride.pipelines.variables import exempt_loopback_from_proxies

JOBS = {
    "train": ("ray_jobs.train", "train, or go on with a run"),
    "sweep": ("ray_jobs.sweep", "measure many settings, and say which to use"),
    "check": ("ray_jobs.check", "see whether a configuration will run here"),
    "prepare": ("ray_jobs.prepare", "prepare its data alone"),
    "evaluate": ("ray_jobs.evaluate", "score a trained model"),
    "predict": ("ray_jobs.predict", "answer questions with it"),
    "generate": ("ray_jobs.generate", "write text with it"),
    "export": ("ray_jobs.export", "write it for other programs"),
    "serve": ("ray_jobs.serve", "answer requests with it, by OpenAI's protocol"),
    "deploy": ("ray_jobs.deploy", "write what takes it to containers, Slurm, Kubernetes, a cloud"),
    "runs": ("pipelines.launch.runs", "list, show, compare, prune, audit runs"),
    "report": ("ray_jobs.report", "build a run's page anew"),
    "ui": ("pipelines.record.ui", "show all runs in MLflow"),
    "certificates": ("pipelines.cluster.certificates", "make certificates for TLS between a cluster's hosts"),
    "presets": ("command", "list the configurations that come along"),
}
"""The module of each word, whose `main` takes the rest of the line, and what it does."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line (of the process, if none is given) says; returns the exit code.

    Signals are heeded from here on, and output that fails ends nothing.
    """
    exempt_loopback_from_proxies()
    with protected_output():
        try:
            with signals_raise():
                return _run(arguments)
        except KeyboardInterrupt as signalled:
            return report_interruption(signalled)


def _run(arguments: Sequence[str] | None) -> int:
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word in ("-h", "--help"):
        print("raystride WORD [settings], where `raystride WORD --help` tells more of each word\n")
        print("\n".join(f"  {name:<12} {about}" for name, (_, about) in JOBS.items()))
        return 0
    if word == "--version":
        print(raystride.__version__)
        return 0
    if word not in JOBS:
        print(f"error: raystride has no word {word!r}; it has {', '.join(JOBS)}", file=sys.stderr)
        return 2
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for scripts: plug-ins lie in the project's folder
    return int(import_module(f"raystride.{JOBS[word][0]}").main(rest))


def main(arguments: Sequence[str]) -> int:
    """`raystride presets`: a line each."""
    from raystride.pipelines.config.parse import presets

    for name, file in presets().items():
        about = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
        print(f"{name:<20} {' '.join(line.removeprefix('#').strip() for line in about).split('. ')[0].rstrip('.')}")
    print("\nnext     raystride train --config NAME")
    return 0
