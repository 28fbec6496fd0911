"""`--help` of a command: one screen, one section (`--help data`), one setting (`--help train.steps`) or all of them.

help_text(Config, Usage(program="raystride train", description="Train or resume a run."), topic="optimizer")
"""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raystride.pipelines.config.reference import SectionReference, SettingReference, sections_reference
from raystride.pipelines.config.section import find_alias, nearest
from raystride.pipelines.system.errors import SettingError

MAX_WIDTH = 110
INDENT = 30
"""Column at which meanings begin."""
ONE_SCREEN = 30
"""A command with at most so many settings shows all of them at once."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Text of a command's first help screen, besides its settings."""

    program: str
    """The command as typed, such as `raystride train`."""
    description: str
    """One sentence about the command."""
    common: Sequence[str] = ()
    """Full names of the settings that are changed most often."""
    examples: Sequence[str] = ()
    """Lines to paste."""


def help_text(cls: type, usage: Usage, topic: str = "") -> str:
    """Returns the text of `--help TOPIC`; a topic is a section, a setting, `all`, or empty for the first screen.

    Raises SettingError for a topic that is none of these.
    """
    sections = list(sections_reference(cls))
    if topic == "all":
        return "\n\n".join(_format_section(section) for section in sections if section.settings)
    if topic:
        return _format_topic(sections, topic.removeprefix("--"))
    return "\n".join(_first_screen(sections, usage))


def _first_screen(sections: Sequence[SectionReference], usage: Usage) -> Iterator[str]:
    yield f"usage: {usage.program} [--config PRESET|FILE] [--SETTING VALUE ...]\n\n{usage.description}\n"
    settings = {entry.name: entry for section in sections for entry in section.settings}
    yield _format_entry("--config PRESET|FILE", "Preset or YAML file; later ones and flags override earlier ones.")
    if len(settings) <= ONE_SCREEN:
        yield from (_format_setting(entry) for entry in settings.values())
    else:
        common = usage.common or [entry.name for entry in sections[0].settings]
        yield from (_format_line(f"--{name}", settings[name].summary) for name in common)
        yield "\nsections:"
        yield from (_format_line(section.name, section.meaning) for section in sections[1:])
    if usage.examples:
        yield "\nexamples:\n" + "\n".join(f"  {line}" for line in usage.examples)
    yield ""
    if len(settings) > ONE_SCREEN:
        yield f"{usage.program} --help SECTION or --help SETTING explains them; --help all lists {len(settings)} settings."
    yield f"{usage.program} --print_config prints the settings as YAML, to copy."


def _format_topic(sections: Sequence[SectionReference], topic: str) -> str:
    for section in sections:
        if topic == section.name:
            return _format_section(section)
    settings = {entry.name: entry for section in sections for entry in section.settings}
    named = [entry for name, entry in settings.items() if topic in (name, name.rpartition(".")[2])]
    if not named and (meant := find_alias(topic, settings)):
        named = [settings[meant]]
    if not named:
        known = [*settings, *(section.name for section in sections)]
        raise SettingError(f"--help {topic}: there is no such section or setting{nearest(topic, known)}", setting=topic)
    return "\n".join(_format_setting(entry) for entry in named)


def _format_section(section: SectionReference) -> str:
    title = f"{section.name}: {section.meaning}\n" if section.name else ""
    return title + "\n".join(_format_setting(entry) for entry in section.settings)


def _format_setting(entry: SettingReference) -> str:
    limits = f", {entry.limits}" if entry.limits else ""
    kept = "; a resumed run keeps it" if entry.fixed else ""
    return _format_entry(f"--{entry.name}", f"{entry.meaning}\n({entry.type}{limits}; default {entry.default}{kept})")


def _format_line(name: str, meaning: str) -> str:
    return f"  {name:<{INDENT - 2}}{textwrap.shorten(meaning, _width() - INDENT, placeholder=' ...')}"


def _width() -> int:
    return max(60, min(MAX_WIDTH, shutil.get_terminal_size().columns))


def _format_entry(name: str, meaning: str) -> str:
    """Returns a name and its meaning in two columns; a long name has a line of its own."""
    lines = [line for text in meaning.split("\n") for line in textwrap.wrap(text, _width() - INDENT)] or [""]
    first = f"  {name:<{INDENT - 2}}" if len(name) < INDENT - 2 else f"  {name}\n{'':<{INDENT}}"
    return first + f"\n{'':<{INDENT}}".join(lines)
