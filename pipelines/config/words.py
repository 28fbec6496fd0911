"""Words of a command line that belong to no flag: a preset's or a run's name alone, and a pattern that the shell expanded.

words_to_flags(Config, ["lm_python", "--train.steps", "5"])          # ["--config", "lm_python", "--train.steps", "5"]
words_to_flags(GenerateConfig, ["my-run"])                           # ["--run", "my-run"]
"""

import difflib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from raystride.pipelines.system.errors import SettingError

NO_VALUE = ("--help", "-h", "--print_config")
"""Flags that take no value."""


def words_to_flags(cls: type, arguments: Sequence[str], presets: Collection[str]) -> list[str]:
    """Returns the arguments with the first word without a flag under the flag that it means, if that is certain.

    A training's may be a preset, a YAML file, or a run that lies in the storage; a job's on a trained model is the run.
    """
    given = list(arguments)
    word = next((index for index, _ in _words_without_flag(given)), None)
    if word is None:
        return given
    names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
    flags = {argument.partition("=")[0] for argument in given}
    text = given[word]
    if "train" in names and "--config" not in flags and (text in presets or _is_yaml_file(text)):
        given[word : word + 1] = ["--config", text]
    elif "run" in names and "--run" not in flags and ("train" not in names or _is_stored_run(given, text)):
        given[word : word + 1] = ["--run", text]
    return given


def refuse_words(arguments: Sequence[str], presets: Collection[str]) -> None:
    """Raises SettingError for a word that belongs to no flag, with the flag that was probably meant."""
    for index, flag in _words_without_flag(arguments):
        word = arguments[index]
        if flag and Path(word).exists():
            first = last_value(arguments, flag.removeprefix("--"))
            folder, ending = Path(first).parent, Path(first).suffix
            raise SettingError(
                f"{flag} has several values, {first} and {word}: quote a pattern, so that the shell leaves it as it is "
                f"({flag} '{folder / '*'}{ending}'), or name a folder ({flag} {folder})",
                setting=flag.removeprefix("--"),
                value=word,
            )
        similar = difflib.get_close_matches(word, presets, 1)
        meant = f"did you mean --config {similar[0]}?" if similar else "settings are given as --NAME VALUE"
        raise SettingError(f"unexpected word {word!r}; {meant}", value=word)


def last_value(arguments: Sequence[str], flag: str) -> str:
    """Returns the value of a flag, the last one if it is given several times; empty if it is not given."""
    values = [value for name, value in pairwise(arguments) if name == f"--{flag}"]
    values += [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{flag}=")]
    return values[-1] if values else ""


def _words_without_flag(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields the index of each word that is neither a flag nor a flag's value, with the flag before it."""
    flag, takes_value = "", False
    for index, argument in enumerate(arguments):
        if argument.startswith("--") or argument == "-h":
            flag, takes_value = argument, "=" not in argument and argument not in NO_VALUE
        elif takes_value:
            takes_value = False
        else:
            yield index, flag.partition("=")[0]


def _is_yaml_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml") and Path(text).is_file()


def _is_stored_run(arguments: Sequence[str], name: str) -> bool:
    base, storage = os.environ.get("RAYSTRIDE_STORAGE", ""), last_value(arguments, "storage") or "runs"
    return (Path(base) / storage / name / "config.yaml").is_file()
