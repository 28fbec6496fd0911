"""Prints a shell's completion script for commands, settings, their values, presets and runs' names.

    eval "$(raystride completion bash)"                   # in ~/.bashrc
    raystride completion zsh > FOLDER/_raystride          # a folder of $fpath

Exit codes: 0 done, 2 unknown shell.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from raystride.command import JOBS
from raystride.pipelines.config import Config
from raystride.pipelines.config.deploy import DeployConfig
from raystride.pipelines.config.jobs import EvaluateConfig, ExportConfig, GenerateConfig, PredictConfig, ServeConfig
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.reference import settings_reference
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.deploy.plan import KINDS

SETTINGS: dict[str, type] = {
    "train": Config, "check": Config, "prepare": Config, "sweep": SweepJobConfig, "evaluate": EvaluateConfig,
    "predict": PredictConfig, "generate": GenerateConfig, "export": ExportConfig, "serve": ServeConfig,
    "deploy": DeployConfig,
}  # fmt: skip
"""Commands whose flags are the fields of a dataclass."""
PATHS = ("source", "input", "file", "storage", "output", "folder", "init_from", "test_source", "validation_source")
"""Last words of settings that take a path."""
FIRST_WORDS = {
    "deploy": (*KINDS, "serve"),
    "runs": ("list", "show", "compare", "audit", "prune", "replay"),
    "presets": tuple(presets()),
    "completion": ("bash", "zsh", "tcsh"),
}
"""Commands whose first word is one of a few."""
OTHER_FLAGS = {
    "runs": ("--storage",),
    "storage": ("--storage", "--json"),
    "report": ("--run", "--storage"),
    "ui": ("--storage", "--port"),
    "presets": ("--full",),
}
"""Flags of commands that have no dataclass."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the script; returns the exit code."""
    import shtab

    parser = argparse.ArgumentParser(prog="raystride completion", description="Print a shell's completion script.")
    parser.add_argument("shell", choices=FIRST_WORDS["completion"])
    print(shtab.complete(_build_parser(), parser.parse_args(arguments).shell))
    return 0


def _build_parser() -> argparse.ArgumentParser:
    """Returns a parser of the whole command line, to complete by and not to parse with."""
    parser = argparse.ArgumentParser(prog="raystride")
    commands = parser.add_subparsers()
    for name, (_, about) in JOBS.items():
        command = commands.add_parser(name, help=about)
        if name in FIRST_WORDS:
            command.add_argument("word", nargs="?", choices=FIRST_WORDS[name])
        for flag in OTHER_FLAGS.get(name, ()):
            _add_flag(command, flag)
        if name in SETTINGS:
            _add_flag(command, "--config", choices=tuple(presets()))
            for entry in settings_reference(SETTINGS[name]):
                _add_flag(command, f"--{entry.name}", choices=entry.choices, about=entry.summary)
    return parser


def _add_flag(command: argparse.ArgumentParser, flag: str, choices: Sequence[str] = (), about: str = "") -> None:
    action: Any = command.add_argument(flag, choices=choices or None, help=about.replace("%", "%%"))
    if flag.lstrip("-").rpartition(".")[2] in PATHS:
        import shtab

        action.complete = shtab.FILE
