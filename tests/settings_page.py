"""Writes the pages of the settings from their dataclasses: `docs/settings.md` and one page a section in `docs/settings`.

python -m tests.settings_page                             # make settings
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from raystride.pipelines.config.deploy import DeployConfig, DeployServeConfig, TargetConfig
from raystride.pipelines.config.jobs import EvaluateConfig, ExportConfig, GenerateConfig, PredictConfig, ServeConfig
from raystride.pipelines.config.reference import SectionReference, SettingReference, sections_reference
from raystride.pipelines.config.sweep import SweepJobConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# Settings

Every setting has one full name. It is a flag (`--train.steps 500`), a key in a YAML file (`train: {steps: 500}`), and a key
in the library (`{"train.steps": 500}`). `raystride train --help SECTION` shows the same tables in the terminal, and
`raystride train --config PRESET --print_config` prints all values as YAML, to copy.

"Fixed" in the column `resume`: a resumed run keeps the value; another one is refused. `make settings` writes these pages.
"""
JOBS = {
    "raystride evaluate": EvaluateConfig,
    "raystride predict": PredictConfig,
    "raystride generate": GenerateConfig,
    "raystride export": ExportConfig,
    "raystride serve": ServeConfig,
    "raystride deploy": DeployConfig,
    "raystride deploy serve": DeployServeConfig,
}
"""Commands besides `train` and `sweep`, by title."""


def pages() -> dict[str, str]:
    """Returns the text of each page by its path below `docs`."""
    outside, *sections = [section for section in sections_reference(SweepJobConfig) if section.settings]
    found = {"settings.md": "\n".join([HEAD, *_index(sections), "## Outside of sections\n", _table(outside.settings), ""])}
    for section in sections:
        found[f"settings/{section.name}.md"] = _page(section.name, section.meaning, [_table(section.settings)])
    known = {section.name: section for section in sections}
    for title, cls in JOBS.items():
        found[f"settings/{_file(title)}"] = _page(title, "Settings of the command.", [*_job_tables(cls, known)])
    target = "The YAML files of `deploy/places`, and those given by `--place`."
    found["settings/place.md"] = _page("A place", target, [*_place_tables()])
    return found


def write_pages() -> None:
    """Writes the pages, and removes those of sections that are no more."""
    (DOCS / "settings").mkdir(exist_ok=True)
    for old in (DOCS / "settings").glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (DOCS / name).write_text(text)


def _index(sections: Sequence[SectionReference]) -> Iterator[str]:
    yield "## Training and sweeps\n\n| section | settings | |\n| --- | ---: | --- |"
    for section in sections:
        meaning = section.meaning.split("\n")[0]
        yield f"| [`{section.name}`](settings/{section.name}.md) | {len(section.settings)} | {_cell(meaning)} |"
    yield "\n## Other commands\n\n| command |\n| --- |"
    for title in JOBS:
        yield f"| [`{title}`](settings/{_file(title)}) |"
    yield "| [a place](settings/place.md), to which `raystride deploy` goes |\n"


def _file(title: str) -> str:
    return f"{title.removeprefix('raystride ').replace(' ', '-')}.md"


def _page(title: str, meaning: str, tables: list[str]) -> str:
    heading = f"`{title}`" if title.islower() else title
    return f"# {heading}\n\n{meaning} All of them: [settings](../settings.md).\n\n" + "\n\n".join(tables) + "\n"


def _job_tables(cls: type, known: dict[str, SectionReference]) -> Iterator[str]:
    """Yields a command's table, then links to the sections of training of which it has settings as they are there."""
    entries: list[SettingReference] = []
    links = []
    for section in sections_reference(cls):
        there = known[section.name].settings if section.name in known else ()
        shared = [entry for entry in section.settings if entry in there]
        entries += [entry for entry in section.settings if entry not in there]
        if shared:
            names = ", ".join(f"`{entry.name}`" for entry in shared) if len(shared) < 3 else f"{len(shared)} settings"
            links.append(f"It takes {names} of [`{section.name}`]({section.name}.md) as training does.")
    yield _table(entries)
    yield from links


def _place_tables() -> Iterator[str]:
    for section in sections_reference(TargetConfig):
        if section.settings:
            yield (f"## {section.name}\n\n{section.meaning}\n\n" if section.name else "") + _table(section.settings)


def _table(entries: Sequence[SettingReference]) -> str:
    rows = [
        f"| `{entry.name}` | {_cell(entry.type)}{', ' * bool(entry.limits)}{entry.limits} | `{_cell(entry.default)}` "
        f"| {entry.since or '0.1'} | {'fixed' if entry.fixed else ''} | {_cell(entry.meaning)} |"
        for entry in entries
    ]
    return "\n".join(
        ["| setting | type | default | since | resume | meaning |", "| --- | --- | --- | --- | --- | --- |", *rows]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    write_pages()
