"""Settings from YAML and flags, by jsonargparse: YAML first, flags over it, both checked before anything starts.

parsed = parse(Config, ["--config", "configs/lm_python.yaml", "--train.steps", "500"], program="train.py")
parsed.settings.train.steps                               # 500
parsed.preset                                             # "lm_python"
"""

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from raystride.locations import __version__
from raystride.pipelines.config.attempts import SETTINGS_FILE
from raystride.pipelines.config.base_model import defaults_without_base, settings_from_base
from raystride.pipelines.config.batch import batch_error, cut_batch_of_content, cut_batch_of_flags, with_slots
from raystride.pipelines.config.help import Usage, help_text
from raystride.pipelines.config.metrics import direction_in_0_3, known_direction
from raystride.pipelines.config.presets import find_config, presets
from raystride.pipelines.config.renamed import Tell, with_new_flags, with_new_names
from raystride.pipelines.config.run import ARGUMENTS, is_argument
from raystride.pipelines.config.section import find_alias, nearest
from raystride.pipelines.config.stored import find_stored_folder, mark_stored, stored_names
from raystride.pipelines.config.words import refuse_words, words_to_flags
from raystride.pipelines.system.credentials import redact_all_uris
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.writer import refuse_unknown

T = TypeVar("T")
SHORT_FORMS = {"launch": "mode"}
"""Sections with a name that stands for one of their settings: `--launch inline`, `launch: inline`."""


@dataclass(frozen=True)
class Parsed(Generic[T]):
    """The settings of a command line, with their preset."""

    settings: T
    """The dataclass, checked."""
    preset: str
    """Name of the YAML file without its ending; `run` without a file."""
    has_source: bool = True
    """Whether the preset, a file, a flag or the caller names the data. Defaults do not: nobody trains on them unasked."""

    def require_source(self) -> None:
        """Raises SettingError if nothing names the data."""
        if not self.has_source:
            named = f"the preset {self.preset}" if self.preset != "run" else "this job"
            rule = f"must be given, as {named} has no data: --data.source FILE_OR_FOLDER, or `python`, the standard library"
            raise SettingError(f"data.source {rule}", setting="data.source", allowed=rule)


def parse(
    cls: type[T],
    arguments: Sequence[str],
    *,
    program: str,
    description: str = "",
    common: Sequence[str] = (),
    examples: Sequence[str] = (),
    stored_in: str = "",
) -> Parsed[T]:
    """Reads settings of a dataclass. `--help` and `--print_config` print and leave.

    `stored_in` is the folder of stored settings, if the files in `arguments` are copies of them. Names of code in stored
    settings are marked (`config.stored`), in those of any file that lies in a storage.

    Raises SettingError for an unknown key (naming the nearest), a wrong value, or a file that cannot be read.
    """
    if (topic := _help_topic(arguments)) is not None:
        usage = Usage(program=program, description=description, common=common, examples=examples)
        print(help_text(cls, usage, topic))
        raise SystemExit(0)
    words = words_to_flags(cls, list(_long_forms(arguments)), presets())
    given = list(with_new_flags(list(_with_presets(iter(words))), cls, _warn))
    known = set(_keys(cls))
    # Ahead of jsonargparse, which does not name the nearest key.
    _check_flags(given, known)
    refuse_words(given, presets())
    files, typed = _config_files(given), given
    written, folders, keys = set(_written_flags(given, known)), dict[str, str](), dict[str, set[str]]()
    given = cut_batch_of_flags(given)
    for file in dict.fromkeys(files):
        content = _read_file(file, cls, known, _warn)
        keys[file], folders[file] = set(_given_keys(content, known)), stored_in or find_stored_folder(file)
        written |= keys[file]
        given = _with_content(given, file, cut_batch_of_content(content))
    stored_in = next(filter(None, folders.values()), stored_in)
    parser = _parser(cls)  # type: ignore[arg-type]
    settings = _instantiate(cls, parser, lambda: parser.parse_args(given) if given else parser.get_defaults(), written)
    if stored_in:
        settings = mark_stored(settings, stored_in, _caller_names(typed, known, keys, folders))
    return Parsed(settings, Path(files[-1]).stem if files else "run", _names_source(written))


def load_settings(cls: type[T], given: Any, changes: Mapping[str, Any] | None = None) -> Parsed[T]:
    """Settings of a dataclass from a preset's name, a YAML file, a mapping or such an object, with `changes` over them.

    Mappings are nested, or have full names (`train.steps`) as keys. Raises SettingError as `parse` does.
    """
    known, preset, stored_in, names = set(_keys(cls)), "run", "", None
    tell = logging.getLogger("raystride").warning
    written: set[str] = set()
    if isinstance(given, cls):
        content: dict[str, Any] = _to_plain(asdict(given))  # type: ignore[call-overload]
        flat, defaults = dict(_iterate_settings(given)), dict(_iterate_settings(cls()))
        if "model.init_from" in _file_keys(_nest(changes or {}), known):
            without_base = defaults_without_base(flat, defaults)
            _merge(content, _nest(without_base), known)
            flat |= without_base
        written = {name for name, value in flat.items() if value != defaults[name]}
        names = list(stored_names(given))
        stored_in = names[0].run if names else ""
    elif isinstance(given, Mapping):
        content = _complete_sections(with_new_names(_nest(given), cls, tell), cls)
    else:
        file = find_config(str(given))
        content, preset, stored_in = _read_file(file, cls, known, tell), Path(file).stem, find_stored_folder(file)
    over = _complete_sections(with_new_names(_nest(changes or {}), cls, tell), cls)
    named = set(_given_keys(over, known))
    written |= named if isinstance(given, cls) else named | set(_given_keys(content, known))
    content, over = cut_batch_of_content(content), cut_batch_of_content(over)
    _merge(content, over, known)
    _check_keys(content, known, "settings")
    parser = _parser(cls)  # type: ignore[arg-type]
    has_source = isinstance(given, cls) or _names_source(written)
    settings = _instantiate(cls, parser, lambda: parser.parse_object(content), written)
    return Parsed(mark_stored(settings, stored_in, named, names) if stored_in else settings, preset, has_source)


def _names_source(written: Collection[str]) -> bool:
    return any(name == "data.source" or name.startswith("data.sources") for name in written)


@cache
def _parser(cls: type) -> Any:
    """Returns the parser of a dataclass; building it takes longer than parsing."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(cls, as_group=False)
    return parser


def _instantiate(cls: type[T], parser: Any, read: Callable[[], Any], written: Collection[str]) -> T:
    """Returns the dataclass from what the parser reads, completed by the base of a training.

    `written` are the full names of the settings that a user gave. Raises SettingError, also for jsonargparse's errors.
    """
    import jsonargparse

    try:
        found = read()
        for name, value in settings_from_base(vars(found.as_flat()), written).items():
            found[name] = _to_plain(value)
        parsed = parser.instantiate(found)
    except SettingError:
        raise
    # Its own errors, and what it lets through of what a dataclass raises.
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise _as_setting_error(cls, error) from None
    if "train.batch" in written and parsed.train.slot_tokens:
        raise batch_error(parsed.train.samples_per_step * parsed.train.slot_size)
    return cls(**{item.name: getattr(parsed, item.name) for item in fields(cls)})  # type: ignore[arg-type]


def _iterate_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting of a dataclass by its full name."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if is_dataclass(value):
            yield from _iterate_settings(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Full names as keys become mappings of mappings."""
    content: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        # The names in sweep.space stay whole: they are its keys.
        plain = _nest(value) if isinstance(value, Mapping) and last != "space" else _to_plain(value)
        place[last] = place[last] | plain if isinstance(plain, dict) and isinstance(place.get(last), dict) else plain
    return content


def _merge(content: dict[str, Any], changes: Mapping[str, Any], known: Collection[str], prefix: str = "") -> None:
    """Puts the changes over the content, section by section.

    A mapping as a value is replaced, except for the arguments of users' functions.
    """
    for key, value in changes.items():
        below = any(name.startswith(f"{prefix}{key}.") for name in known) or f"{prefix}{key}" in ARGUMENTS
        if below and isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value, known, f"{prefix}{key}.")
        else:
            content[key] = value


def to_yaml(settings: Any) -> str:
    """The settings as YAML that `--config` reads, without passwords and keys: `Section.with_secrets` has them again."""
    return _dump(asdict(settings))


def _dump(content: dict[str, Any]) -> str:
    return yaml.safe_dump(redact_all_uris(_to_plain(content)), sort_keys=False, allow_unicode=True)


WRITER_COMMENT, CHANGED_COMMENT = "# writer: ", "# not at their defaults: "
"""Lines at the head of stored settings: the version that wrote them, and the full names of those settings."""


def to_stored_yaml(settings: Any) -> str:
    """The settings as YAML for a run's folder: headed by its writer's version, and by the names that are not at their
    defaults, for versions that do not know them (`system.writer`)."""
    defaults = dict(_iterate_settings(type(settings)()))
    changed = [name for name, value in _iterate_settings(settings) if value != defaults[name]]
    content = asdict(settings)
    for section, _, name in (key.partition(".") for key in settings.idle_settings()):
        del content[section][name]
    return f"{WRITER_COMMENT}{__version__}\n{CHANGED_COMMENT}{', '.join(changed)}\n{_dump(content)}"


def _refuse_newer_settings(cls: type, text: str, content: dict[str, Any], file: str) -> None:
    """Raises WrittenByNewer if a newer version wrote the settings, and one that is not known here is not at its default."""
    marks = (WRITER_COMMENT, CHANGED_COMMENT)
    head = {mark: line.removeprefix(mark) for line in text.splitlines()[:2] for mark in marks if line.startswith(mark)}
    known, values = set(_keys(cls)), dict(_flatten_keys(content))
    changed = (name.strip() for name in head.get(CHANGED_COMMENT, "").split(","))
    unknown = {name: values.get(name) for name in changed if name and name not in known}
    refuse_unknown(file, head.get(WRITER_COMMENT), unknown)


def _flatten_keys(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value of nested mappings by its full name, those of mappings as well."""
    for key, value in content.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _flatten_keys(value, f"{prefix}{key}.")


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, str):
        return str(value)  # a marked name is a string of its own class
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def from_yaml(cls: type[T], text: str, file: str = "the settings") -> T:
    """Settings from YAML as `to_yaml` or `to_stored_yaml` wrote it. Keys that this version does not know are left out.

    Raises SettingError, and WrittenByNewer with the name of the file if that would change the settings of a newer version.
    """
    content = with_new_names(yaml.safe_load(text) or {}, cls, None)
    _refuse_newer_settings(cls, text, content, file)
    settings: T = _build(cls, content)
    return settings


def read_stored_settings(cls: type[T], folder: Folder) -> T:
    """Returns the stored settings of a run or sweep, with its names of code marked as such.

    Raises FileNotFoundError if there are none, and as `from_yaml` does.
    """
    text = folder.read(SETTINGS_FILE).decode()
    found = from_yaml(cls, text, str(folder / SETTINGS_FILE))
    return mark_stored(found if text.startswith(WRITER_COMMENT) else _with_direction_of_0_3(found), folder.uri)


def _with_direction_of_0_3(settings: T) -> T:
    """Returns settings that 0.3 or an earlier version stored, with the direction that a metric had then."""
    validation: Any = getattr(settings, "validation", None)
    if validation is None or validation.direction != "auto":
        return settings
    direction = direction_in_0_3(validation.metric)
    if known_direction(validation.metric) == direction:
        return settings
    return replace(settings, validation=replace(validation, direction=direction))  # type: ignore[type-var]


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
    """Returns the arguments with short forms spelled out, if a plain word follows, no file or JSON of a section."""
    for argument, after in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        word = value if equals else after
        setting = SHORT_FORMS.get(flag.removeprefix("--"))
        yield f"{flag}.{setting}{equals}{value}" if setting and word.isalpha() else argument


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


def _help_topic(arguments: Sequence[str]) -> str | None:
    """Returns the word after `--help`, empty if there is none; None without `--help`."""
    for argument, after in pairwise([*arguments, ""]):
        if argument in ("--help", "-h"):
            return after
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def _written_flags(arguments: Sequence[str], known: set[str]) -> Iterator[str]:
    """Yields the full names of the settings that flags give, also those in a value for a whole section."""
    for argument, after in pairwise([*arguments, ""]):
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            yield key
            if any(name.startswith(f"{key}.") for name in known):
                content = yaml.safe_load(value if equals else after)
                yield from _file_keys({key: content} if isinstance(content, dict) else {}, known)


def _caller_names(
    arguments: Sequence[str], known: set[str], keys: Mapping[str, set[str]], folders: Mapping[str, str]
) -> set[str]:
    """Returns the settings that the caller gives himself: the last of a flag, a file of his, and a stored one counts.

    `keys` are the settings in each file, `folders` the folder of each stored one, "" for a file of the caller's.
    """
    named = set[str]()
    for argument, after in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            file = value if equals else after
            named = named - keys[file] if folders[file] else named | keys[file]
        elif flag.startswith("--"):
            named |= set(_written_flags([argument] if equals else [argument, after], known))
    return named


def _check_flags(arguments: Sequence[str], known: set[str]) -> None:
    own = {"config", "print_config", "help"}
    for argument in arguments:
        if argument.startswith("--"):
            key = argument[2:].split("=")[0]
            if is_argument(key):
                section, mapping, name, *below = key.split(".")
                if below:
                    remedy = f"give it as --{section}.{mapping}.{name} '{{{below[0]}: ...}}'"
                    raise SettingError(f"--{key} lies inside the argument {name}: {remedy}", setting=key)
            elif key not in known | own:
                raise SettingError(f"there is no setting --{key}{nearest(key, known)}", setting=key)


def _config_files(arguments: Sequence[str]) -> list[str]:
    files = [value for flag, value in pairwise(arguments) if flag == "--config"]
    return files + [a.removeprefix("--config=") for a in arguments if a.startswith("--config=")]


def _read_file(file: str, cls: type, known: set[str], tell: Tell) -> dict[str, Any]:
    """The settings in a file, by their new names. Raises SettingError."""
    try:
        content = yaml.safe_load(Path(file).read_text())
    except FileNotFoundError:
        similar = difflib.get_close_matches(file, presets(), 1)
        meant = f"did you mean {similar[0]}? " if similar else ""
        message = f"--config {file}: there is no such file; {meant}presets are {', '.join(presets())}"
        raise SettingError(message, setting="config", value=file) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingError(f"--config {file} cannot be read: {error}", setting="config", value=file) from None
    if content is not None and not isinstance(content, dict):
        raise SettingError(
            f"--config {file} must hold settings by name, not {type(content).__name__}", setting="config", value=file
        )
    content = with_new_names(_nest(content or {}), cls, lambda text: tell(f"{file}: {text}"))
    _check_keys(content, known, file)
    return _complete_sections(content, cls, f"{file}: ")


def _complete_sections(content: Mapping[str, Any], cls: Any, where: str = "", prefix: str = "") -> dict[str, Any]:
    """Returns the content without sections that are empty, and with those in short form spelled out.

    Raises SettingError if a section has a value of its own in place of settings.
    """
    completed = dict(content)
    for item in fields(cls):
        name, value = f"{prefix}{item.name}", content.get(item.name)
        if item.name not in content or not (isinstance(item.type, type) and is_dataclass(item.type)):
            continue
        if value is None:
            del completed[item.name]
        elif isinstance(value, str) and name in SHORT_FORMS:
            completed[item.name] = {SHORT_FORMS[name]: value}
        elif isinstance(value, Mapping):
            completed[item.name] = _complete_sections(value, item.type, where, f"{name}.")
        else:
            raise _section_error(cls, name, value, where, item.type)
    return completed


def _section_error(cls: Any, name: str, value: Any, where: str = "", section: Any = None) -> SettingError:
    """Returns the error for a value in the place of a section, with one of the section's settings as an example."""
    section = section or _annotation(cls, name)
    example = f"{name}.{SHORT_FORMS.get(name) or fields(section)[0].name}"
    rule = f"must hold settings by name, such as {example}; --help {name} lists them"
    meant = find_alias(name, [*_keys(cls)])
    hint = f"; did you mean {meant}?" if meant else ""
    return SettingError(f"{where}{name} is {value!r}: it {rule}{hint}", setting=name, value=value, allowed=rule)


def _with_content(arguments: Sequence[str], file: str, content: dict[str, Any]) -> list[str]:
    """Returns the arguments with a file's content in place of its name, if that differs from the file."""
    if content == (yaml.safe_load(Path(file).read_text()) or {}):
        return list(arguments)
    text = yaml.safe_dump(content, sort_keys=False)
    return [{file: text, f"--config={file}": f"--config={text}"}.get(argument, argument) for argument in arguments]


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _check_keys(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in _file_keys(content, known):
        if key not in known:
            raise SettingError(f"{where}: there is no setting {key}{nearest(key, known)}", setting=key)


def _given_keys(content: dict[str, Any], known: set[str]) -> Iterator[str]:
    """Yields the names in a file or a mapping, but that of a batch of 0, as stored runs have it: their slots are given."""
    train = content.get("train")
    has_batch = isinstance(train, dict) and bool(train.get("batch"))
    return (name for name in _file_keys(content, known) if name != "train.batch" or has_batch)


def _file_keys(content: dict[str, Any], known: set[str], prefix: str = "") -> Iterator[str]:
    """Returns the names in a file, but none below a setting with a mapping as its value, such as sweep.space."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        yield name
        if isinstance(value, dict) and (name not in known or any(each.startswith(f"{name}.") for each in known)):
            yield from _file_keys(value, known, f"{name}.")


def with_settings(config: T, settings: Mapping[str, Any]) -> T:
    """Returns the configuration with these values; settings that came from a base follow if they name another.

    Raises SettingError for a value that a setting, or a rule between settings, forbids.
    """
    if "model.init_from" in settings:
        settings = _with_network_of_base(config, settings)
    known: Any = config
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if is_argument(key):
            section, mapping, *names, last = key.split(".")
            place = sections.setdefault(section, {}).setdefault(mapping, deepcopy(getattr(known.fit, mapping)))
            for name in names:
                place = place.setdefault(name, {})
            place[last] = value
            continue
        sections.setdefault(section, {})[name] = parse_value(type(config), key, value)
    if sections.get("train", {}).get("batch"):
        sections["train"] = with_slots({"slot_tokens": known.train.slot_tokens} | sections["train"])
    whole = sections.pop("", {})
    parts = {name: replace(getattr(known, name), **changes) for name, changes in sections.items()}
    changed: T = replace(known, **whole, **parts)
    return changed


def _with_network_of_base(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings and, if nobody gave them, those of network and tokenizer of the base that they name."""
    flat, defaults = dict(_iterate_settings(config)), dict(_iterate_settings(type(config)()))
    without_base = defaults_without_base(flat, defaults)
    flat |= {**without_base, **settings}
    given = {name for name, value in flat.items() if value != defaults.get(name)} | {*settings}
    return {**without_base, **settings_from_base(flat, given), **settings}


def parse_value(cls: Any, key: str, value: Any) -> Any:
    """Returns a value from YAML in the type of the setting with this full name. Raises SettingError if it has none."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    annotation = _annotation(cls, key)
    parser.add_argument("--value", type=annotation)
    try:
        return parser.parse_object({"value": value}).value
    except (jsonargparse.ArgumentError, TypeError, ValueError):
        raise SettingError(
            f"{key} is {value!r}: it must be {_describe_type(annotation)}", setting=key, value=value
        ) from None


def _as_setting_error(cls: Any, error: Exception) -> SettingError:
    """Returns jsonargparse's error as one of ours: the setting, the value, the allowed values."""
    text = " ".join(line.strip(" -") for line in str(error).splitlines() if line.strip())
    if section := re.search(r'key "([\w.]+)": Unable to load config [\'"](.*?)[\'"] ', f"{text} "):
        return _section_error(cls, section[1], section[2])
    key, value = re.search(r'key "([\w.]+)"', text), re.search(r"(?:Got|Given) value: (.*)$", text)
    if key and value:
        return SettingError(
            f"{key[1]} is {value[1]!r}: it must be {_describe_type(_annotation(cls, key[1]))}",
            setting=key[1],
            value=value[1],
        )
    return SettingError(text)


def _annotation(cls: Any, key: str) -> Any:
    """The type of a setting by its full name."""
    for part in key.split("."):
        cls = get_type_hints(cls)[part]
    return cls


def _describe_type(annotation: Any) -> str:
    """Returns the values that a type allows, in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is dict:
        return "a mapping"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return (
            "a list such as [" + ", ".join("..." if a is Ellipsis else _describe_type(a) for a in get_args(annotation)) + "]"
        )
    return " or ".join(_describe_type(part) for part in get_args(annotation))


def command(
    cls: type[T],
    job: Callable[[Parsed[T]], int],
    arguments: Sequence[str] | None = None,
    *,
    program: str,
    description: str,
    common: Sequence[str] = (),
    examples: Sequence[str] = (),
    stored_in: str = "",
) -> int:
    """Parses a job's command line (by default that of the process) and runs `job`; returns the exit code.

    `common` and `examples` are settings and lines on the first screen of its help. `stored_in`: see `parse`.

    Raises what parser and job raise: the caller, the command `raystride`, makes a line and an exit code of it.
    """
    given = sys.argv[1:] if arguments is None else arguments
    usage = {"program": program, "description": description}
    return job(parse(cls, given, **usage, common=common, examples=examples, stored_in=stored_in))
