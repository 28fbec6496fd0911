"""Settings from YAML and flags, by jsonargparse: YAML first, flags over it, both checked before anything starts.

parsed = parse(Config, ["--config", "configs/lm_python.yaml", "--train.steps", "500"], program="train.py")
parsed.settings.train.steps                               # 500
parsed.preset                                             # "lm_python"
"""

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from raystride.pipelines.config.renamed import Tell, with_new_flags, with_new_names
from raystride.pipelines.config.section import SettingError, nearest
from raystride.pipelines.credentials import MissingSecret, masked_all

T = TypeVar("T")
PRESETS = Path(__file__).parents[2] / "configs"
SHORT_FORMS = {"--launch": "--launch.mode"}
"""Flags of whole sections that stand for one of their settings."""


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """What the command line said."""

    settings: T
    """The dataclass, checked."""
    preset: str
    """Name of the YAML file without its ending; `run` where there was none."""


def parse(cls: type[T], arguments: Sequence[str], *, program: str, description: str = "") -> Parsed[T]:
    """Reads settings of a dataclass. `--help` and `--print_config` print and leave.

    Raises SettingError for an unknown key (naming the nearest), a wrong value, or a file that cannot be read.
    """
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    given = list(with_new_flags(list(_with_presets(_long_forms(arguments))), cls, _warn))
    known = set(_keys(cls))
    # Ahead of jsonargparse, which does not name the nearest key.
    _check_flags(given, known)
    files = _config_files(given)
    for file in dict.fromkeys(files):
        given = _with_content(given, file, _read_file(file, cls, known, _warn))
    parser = jsonargparse.ArgumentParser(prog=program, description=description, exit_on_error=False)
    parser.add_argument(
        "--config", action="config", help="YAML file of settings; later ones and flags go over earlier ones."
    )
    parser.add_class_arguments(cls, as_group=False)
    settings = _made(cls, parser, lambda: parser.parse_args(given) if given else parser.get_defaults())
    return Parsed(settings, Path(files[-1]).stem if files else "run")


def configured(cls: type[T], given: Any, changes: Mapping[str, Any] | None = None) -> Parsed[T]:
    """Settings of a dataclass from a preset's name, a YAML file, a mapping or such an object, with `changes` over them.

    Mappings are nested, or have full names (`train.steps`) as keys. Raises SettingError as `parse` does.
    """
    import jsonargparse

    known, preset = set(_keys(cls)), "run"
    tell = logging.getLogger("raystride").warning
    if isinstance(given, cls):
        content: dict[str, Any] = _plain(asdict(given))  # type: ignore[call-overload]
    elif isinstance(given, Mapping):
        content = with_new_names(_nested(given), cls, tell)
    else:
        file = find_config(str(given))
        content, preset = _read_file(file, cls, known, tell), Path(file).stem
    _merge(content, with_new_names(_nested(changes or {}), cls, tell), known)
    _check_keys(content, known, "settings")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, as_group=False)
    return Parsed(_made(cls, parser, lambda: parser.parse_object(content)), preset)


def _made(cls: type[T], parser: Any, read: Callable[[], Any]) -> T:
    """The dataclass from what the parser reads. Raises SettingError, also for what jsonargparse says in its own words."""
    import jsonargparse

    try:
        parsed = parser.instantiate(read())
    except SettingError:
        raise
    # Its own errors, and what it lets through of what a dataclass raises.
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise _as_setting_error(cls, error) from None
    return cls(**{item.name: getattr(parsed, item.name) for item in fields(cls)})  # type: ignore[arg-type]


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Full names as keys become mappings of mappings."""
    content: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        # The names in sweep.space stay whole: they are its keys.
        plain = _nested(value) if isinstance(value, Mapping) and last != "space" else _plain(value)
        place[last] = place[last] | plain if isinstance(plain, dict) and isinstance(place.get(last), dict) else plain
    return content


def _merge(content: dict[str, Any], changes: Mapping[str, Any], known: Collection[str], prefix: str = "") -> None:
    """Puts the changes over the content, section by section; a setting whose value is a mapping is replaced."""
    for key, value in changes.items():
        below = any(name.startswith(f"{prefix}{key}.") for name in known)
        if below and isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value, known, f"{prefix}{key}.")
        else:
            content[key] = value


def presets() -> dict[str, Path]:
    """The configurations that come along, by name."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def find_config(name: str) -> str:
    """The file that `--config` names: one that is there, or else a preset."""
    return name if Path(name).exists() or name not in presets() else str(presets()[name])


def to_yaml(settings: Any) -> str:
    """The settings as YAML that `--config` reads, without passwords and keys: `Section.filled` has them again."""
    return yaml.safe_dump(masked_all(_plain(asdict(settings))), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def from_yaml(cls: type[T], text: str) -> T:
    """Settings from YAML as `to_yaml` wrote it. Keys that this version does not know are left out. Raises SettingError."""
    settings: T = _build(cls, with_new_names(yaml.safe_load(text) or {}, cls, None))
    return settings


def _build(cls: Any, content: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for item in fields(cls):
        if item.name in content:
            value = content[item.name]
            nested = isinstance(item.type, type) and is_dataclass(item.type)
            # YAML has lists where settings are tuples.
            values[item.name] = _build(item.type, value) if nested else tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _keys(cls: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(cls):
        yield f"{prefix}{item.name}"
        if isinstance(item.type, type) and is_dataclass(item.type):
            yield from _keys(item.type, f"{prefix}{item.name}.")


def _long_forms(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments with short forms spelled out, where a plain word follows and no file or JSON for the whole section."""
    for argument, after in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        word = value if equals else after
        yield f"{SHORT_FORMS[flag]}{equals}{value}" if flag in SHORT_FORMS and word.isalpha() else argument


def _with_presets(arguments: Iterator[str]) -> Iterator[str]:
    """The arguments with presets' names replaced by their files."""
    before = ""
    for argument in arguments:
        if before == "--config":
            argument = find_config(argument)
        elif argument.startswith("--config="):
            argument = f"--config={find_config(argument.removeprefix('--config='))}"
        yield argument
        before = argument


def _check_flags(arguments: Sequence[str], known: set[str]) -> None:
    own = {"config", "print_config", "help"}
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].split("=")[0]
            if key not in known | own:
                raise SettingError(f"there is no setting --{key}{nearest(key, known)}", setting=key)


def _config_files(arguments: Sequence[str]) -> list[str]:
    files = [value for flag, value in pairwise(arguments) if flag == "--config"]
    return files + [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]


def _read_file(file: str, cls: type, known: set[str], tell: Tell) -> dict[str, Any]:
    """The settings in a file, by their new names. Raises SettingError."""
    try:
        content = yaml.safe_load(Path(file).read_text())
    except FileNotFoundError:
        raise SettingError(
            f"--config {file}: there is no such file; presets are {', '.join(presets())}", setting="config", value=file
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError(f"--config {file} cannot be read: {error}", setting="config", value=file) from None
    if content is not None and not isinstance(content, dict):
        raise SettingError(
            f"--config {file} must hold settings by name, not {type(content).__name__}", setting="config", value=file
        )
    content = with_new_names(_nested(content or {}), cls, lambda text: tell(f"{file}: {text}"))
    _check_keys(content, known, file)
    return content


def _with_content(arguments: Sequence[str], file: str, content: dict[str, Any]) -> list[str]:
    """The arguments with what stands in the file in place of its name, where old names of settings were replaced."""
    if content == _nested(yaml.safe_load(Path(file).read_text()) or {}):
        return list(arguments)
    text = yaml.safe_dump(content, sort_keys=False)
    return [{file: text, f"--config={file}": f"--config={text}"}.get(argument, argument) for argument in arguments]


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in _file_keys(content, known):
        if key not in known:
            raise SettingError(f"{where}: there is no setting {key}{nearest(key, known)}", setting=key)


def _file_keys(content: dict[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """The names in a file; below a setting whose value is a mapping of its own, such as sweep.space, there are none."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict) and (name not in known or any(each.startswith(f"{name}.") for each in known)):
            yield from _file_keys(value, known, f"{name}.")


def with_settings(config: T, settings: Mapping[str, Any]) -> T:
    """The configuration with these values. Raises SettingError for what a setting, or a rule between them, forbids."""
    known: Any = config
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = as_typed(type(config), key, value)
    whole = sections.pop("", {})
    parts = {name: replace(getattr(known, name), **changes) for name, changes in sections.items()}
    changed: T = replace(known, **whole, **parts)
    return changed


def as_typed(cls: Any, key: str, value: Any) -> Any:
    """A value from YAML as the setting of this full name takes it. Raises SettingError where its type cannot."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    annotation = _annotation(cls, key)
    parser.add_argument("--value", type=annotation)
    try:
        return parser.parse_object({"value": value}).value
    except (jsonargparse.ArgumentError, TypeError, ValueError):
        raise SettingError(f"{key} is {value!r}: it must be {_described(annotation)}", setting=key, value=value) from None


def _as_setting_error(cls: Any, error: Exception) -> SettingError:
    """jsonargparse's report in the words of our own errors: the setting, the value, what is allowed."""
    text = " ".join(line.strip(" -") for line in str(error).splitlines() if line.strip())
    key, value = re.search(r'key "([\w.]+)"', text), re.search(r"(?:Got|Given) value: (.*)$", text)
    if key and value:
        return SettingError(
            f"{key[1]} is {value[1]!r}: it must be {_described(_annotation(cls, key[1]))}", setting=key[1], value=value[1]
        )
    return SettingError(text)


def _annotation(cls: Any, key: str) -> Any:
    """The type of a setting by its full name."""
    for part in key.split("."):
        cls = get_type_hints(cls)[part]
    return cls


def _described(annotation: Any) -> str:
    """What a type allows, in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "a list such as [" + ", ".join("..." if a is Ellipsis else _described(a) for a in get_args(annotation)) + "]"
    return " or ".join(_described(part) for part in get_args(annotation))


def command(
    cls: type[T], job: Callable[[Parsed[T]], int], arguments: Sequence[str] | None = None, *, program: str, description: str
) -> int:
    """A job's whole command line: parses it (what the process was given, if nothing is) and runs `job`; the exit code.

    Wrong settings, whether the parser finds them or the job does, are one line and exit code 2.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        return job(parse(cls, given, program=program, description=description))
    except (SettingError, MissingSecret) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
