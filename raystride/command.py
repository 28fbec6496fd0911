"""The command `raystride`: the first word names a job, the other arguments belong to the job.

raystride train --config lm_python --train.steps 500
raystride --help
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import raystride
from raystride.pipelines.system.output import protected_output
from raystride.pipelines.system.signals import raise_on_signals, report_interruption
from raystride.pipelines.system.variables import exempt_loopback_from_proxies
from raystride.project_folder import put_working_folder_last

JOBS = {
    "train": ("jobs.train", "train or resume a run"),
    "sweep": ("jobs.sweep", "measure many settings and recommend the best"),
    "check": ("jobs.check", "report whether a configuration will run here"),
    "prepare": ("jobs.prepare", "prepare the data of a configuration"),
    "evaluate": ("jobs.evaluate", "score a trained model on a test set"),
    "predict": ("jobs.predict", "run inference on files or text"),
    "generate": ("jobs.generate", "generate text with a trained model"),
    "export": ("jobs.export", "export a model (Hugging Face, MLflow)"),
    "serve": ("jobs.serve", "serve a model (OpenAI API)"),
    "deploy": ("pipelines.launch.deploy.driver", "generate deployment files (Compose, Slurm, KubeRay, cloud)"),
    "node": ("jobs.node", "run by the deployment files, on each node"),
    "runs": ("jobs.runs", "list, show, compare, prune and audit runs"),
    "storage": ("jobs.storage", "list what lies in a storage: sizes, ages, use"),
    "report": ("jobs.report", "rebuild a run's HTML report"),
    "ui": ("jobs.ui", "show all runs in MLflow"),
    "certificates": ("jobs.certificates", "make TLS certificates for a cluster's hosts"),
    "presets": ("jobs.presets", "list the configurations that come along, or print one"),
    "completion": ("jobs.completion", "print a shell's completion script"),
}
"""By word: the module with the job's `main`, and the job's description."""
OWN_HANDLERS = ("serve",)
"""Jobs that handle Ctrl-C themselves."""
DEFECTS = {"prepare": "preparation"}
"""Jobs whose own errors are some lines with their place, and no traceback: by word, what is said to have failed."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (the process's, if none is given); returns the exit code.

    This is the one place where errors become a line and an exit code. Handles termination signals, and survives output that
    cannot be written.
    """
    exempt_loopback_from_proxies()
    with protected_output():
        try:
            with raise_on_signals():
                return _run_command(arguments)
        except KeyboardInterrupt as signalled:
            return report_interruption(signalled)


def run_script(file: str) -> None:
    """Runs the job with the name of a script of `ray_jobs`, and exits with its exit code."""
    sys.exit(run([Path(file).stem, *sys.argv[1:]]))


def _run_command(arguments: Sequence[str] | None) -> int:
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word in ("-h", "--help"):
        print("usage: raystride COMMAND [options]\n\ncommands (raystride COMMAND --help explains each):")
        print("\n".join(f"  {name:<12} {about}" for name, (_, about) in JOBS.items()))
        return 0
    if word == "--version":
        print(raystride.__version__)
        return 0
    if word not in JOBS:
        similar = difflib.get_close_matches(word, JOBS, 1)
        meant = f"did you mean {similar[0]}?" if similar else f"commands are {', '.join(JOBS)}"
        print(f"error: unknown command {word!r}; {meant}", file=sys.stderr)
        return 2
    put_working_folder_last()
    from raystride.pipelines.launch.console.exit_codes import run_with_exit_code  # slow, and nothing above needs it

    module = import_module(f"raystride.{JOBS[word][0]}")
    return run_with_exit_code(lambda: int(module.main(rest)), own_handlers=word in OWN_HANDLERS, what=DEFECTS.get(word, ""))
