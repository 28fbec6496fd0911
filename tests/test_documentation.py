"""Every block of every page is what its tag says: code compiles, data parses, and commands and their flags exist.

Commands are looked at and not run; `test_own_task.py`, `test_api_page.py` and `test_finetuning_walk.py` in `end_to_end` run
those of whole pages.
"""

import ast
import configparser
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import raystride
from benchmarks import readme_figures
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.jobs import EvaluateConfig, ExportConfig, GenerateConfig, PredictConfig, ServeConfig
from raystride.pipelines.config.parse import Parsed, parse
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.run import is_argument
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.config.words import last_value, words_to_flags
from raystride.pipelines.launch.console.ray_job_status import STOP_WAIT_VARIABLE
from tests import api_page
from tests.some import some

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md", "tests/README.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "deploy").glob("*/README.md")),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
FLAGS: dict[str, list[str]] = json.loads((ROOT / "tests" / "end_to_end" / "frozen_settings.json").read_text())
"""The flags of each command."""
OF_TRAINING = ("check", "prepare")
WITHOUT_SETTINGS = ("presets", "completion")
CLASSES: dict[str, type] = {
    **dict.fromkeys(("train", "check", "prepare"), Config),
    "sweep": SweepJobConfig,
    "evaluate": EvaluateConfig,
    "predict": PredictConfig,
    "generate": GenerateConfig,
    "export": ExportConfig,
    "serve": ServeConfig,
}
"""The settings of each command."""
TARGETS = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())  # type: ignore[index]
KINDS = ("slurm", "compose", "kuberay", "launcher", "sky")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    tag: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            indent = len(found[1])
            body = "\n".join(line[indent:] if not line[:indent].strip() else line for line in found[3].splitlines())
            yield Block(page, text.count("\n", 0, found.start()) + 1, found[2], body)


def of_kind(*tags: str) -> list[Block]:
    return some([block for block in blocks() if block.tag in tags])


def test_every_block_has_a_tag_that_says_what_it_is() -> None:
    known = ("sh", "console", "text", "python", "yaml", "json", "toml", "ini")
    assert not [f"{block} `{block.tag}`" for block in blocks() if block.tag not in known]


def test_no_fence_is_left_open() -> None:
    assert not [page for page in PAGES if len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2]


def test_python_compiles_and_what_it_takes_from_raystride_is_there() -> None:
    missing = []
    for block in of_kind("python"):
        for node in ast.walk(ast.parse(block.text, str(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raystride"):
                module = __import__(str(node.module), fromlist=[alias.name for alias in node.names])
                missing += [f"{block} {alias.name}" for alias in node.names if not hasattr(module, alias.name)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raystride":
                missing += [f"{block} {node.attr}"] * (node.attr not in raystride.__all__)
    assert not missing


def test_the_reference_of_the_library_is_that_of_its_docstrings() -> None:
    page = api_page.PAGE.read_text()
    assert page == api_page.page(), "make api writes it anew"
    assert not [name for name in raystride.__all__ if f"`{name}`" not in page]


def test_the_table_of_figures_is_that_of_the_results() -> None:
    page = (ROOT / "README.md").read_text()
    assert page == readme_figures.with_table(page), "python -m benchmarks.readme_figures writes it anew"
    _, table, rest = page.partition(readme_figures.BEGIN)
    assert table
    assert re.search(r"\d,\d{3}", rest.partition(readme_figures.END)[0])


def test_the_tour_of_a_kernel_shows_the_code_as_it_is() -> None:
    files = ("triton_kernels/swiglu.py", "triton_kernels/gated.py", "tests/triton_kernels/test_swiglu.py")
    code = "".join((ROOT / name).read_text() for name in files)
    for block in some([block for block in of_kind("python") if block.page.name == "kernels-tour.md"]):
        assert block.text.strip() in code, block


def test_data_parses() -> None:
    for block in of_kind("yaml"):
        assert list(yaml.safe_load_all(block.text)), block
    for block in of_kind("toml"):
        assert tomllib.loads(block.text), block
    for block in of_kind("ini"):
        parser = configparser.ConfigParser()
        parser.read_string(block.text)
        assert parser.sections(), block
    for block in of_kind("json"):
        rest = block.text.strip()
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].strip()


def test_shell_can_be_pasted() -> None:
    for block in of_kind("sh"):
        looked_at = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert not looked_at.stderr, f"{block}: {looked_at.stderr}"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each simple command, without here-documents, comments and what follows a pipe."""
    text = re.sub(r"<< *'?(\w+)'?(.*)\n(?:.*\n)*?\1$", r"\2", block.text, flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|;&<>()")
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            read = list(lexer)
        except ValueError:  # a quotation over several lines, which bash has looked at
            continue
        for word in [*read, ";"]:
            if set(word) <= set("|;&<>()"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def faults(words: list[str]) -> Iterator[str]:
    """What a command of ours names that is not there."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    program, arguments = words[0], words[1:]
    if program == "make":
        yield from (f"make {word}" for word in arguments[:1] if re.match(r"[a-z-]+$", word) and word not in TARGETS)
    elif Path(program).name.startswith("python") and arguments[:1] == ["-m"]:
        module = arguments[1]
        if module.split(".")[0] in ("raystride", "benchmarks", "tests") and find_spec(module) is None:
            yield f"python -m {module}"
        if module == "raystride":
            yield from faults(["raystride", *arguments[2:]])
    elif Path(program).name.startswith("python") and arguments and arguments[0].startswith("ray_jobs/"):
        if not (ROOT / arguments[0]).exists():
            yield arguments[0]
        yield from faults(["raystride", Path(arguments[0]).stem, *arguments[1:]])
    elif Path(program).name == "raystride" and arguments and not arguments[0].startswith("-"):
        yield from _faults_of_ours(arguments)
    elif program == "ray" and arguments[:2] == ["job", "submit"] and "--" in arguments:
        yield from faults(arguments[arguments.index("--") + 1 :])


def _faults_of_ours(words: list[str]) -> Iterator[str]:
    command = words[0]
    if command in WITHOUT_SETTINGS or (command in ("runs", "deploy") and len(words) == 1):
        return
    if command == "runs":
        command = f"runs {words[1]}"
    elif command == "deploy":
        command = "deploy serve" if words[1] == "serve" else "deploy slurm" if words[1] in KINDS else words[1]
    elif command in OF_TRAINING:
        command = "train"
    if command not in FLAGS:
        yield f"raystride {' '.join(words[:2])}"
        return
    allowed = {*FLAGS[command], "config", "help", "launch", "print_config"}  # `--launch inline` is short for its mode
    if command == "deploy slurm":
        allowed |= {*FLAGS["train"], *FLAGS["sweep"]}
    if words[0] == "check":
        allowed.add("kernels")  # no setting: it proves them, too
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        flag, _, value = word.removeprefix("--").partition("=")
        if flag.replace("-", "_") not in {name.replace("-", "_") for name in allowed} and not _is_open(flag):
            yield f"raystride {words[0]} {word}"
        if flag == "config":
            value = value or words[number + 1]
            if re.fullmatch(r"[a-z_0-9]+", value) and not (ROOT / "configs" / f"{value}.yaml").exists():
                yield f"--config {value}"


def _is_open(flag: str) -> bool:
    """A setting whose names below it are the user's: a source of a mixture, an argument of a function of theirs."""
    return is_argument(flag) or flag.startswith("data.sources.")


def test_whoever_starts_ray_or_submits_a_job_gives_it_time_to_save() -> None:
    """On the same page as commands to paste, and in a line of a table or text itself."""
    starts = re.compile(r"\bray (?:start --head|job submit\b.*(?:train|script))")
    pages = {block.page for block in of_kind("sh") if any(starts.search(line) for line in block.text.split("\n"))}
    assert not [page for page in some(list(pages)) if STOP_WAIT_VARIABLE not in page.read_text()]
    spans = {span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text()) if starts.search(span)}
    told = [span for span in spans if STOP_WAIT_VARIABLE in span]
    # What stands in a sentence is a name of the command, and no line to paste.
    names = ("ray start --head", "ray job submit --working-dir . -- python ray_jobs/train.py ...")
    assert not spans - {*some(told)} - {*names, "ray job submit -- python ray_jobs/train.py"}


def test_commands_presets_and_flags_are_there() -> None:
    shell = of_kind("sh", "console")
    assert not [f"{block} {fault}" for block in shell for words in commands(block) for fault in faults(words)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("raystride trian --config lm_python", "raystride trian --config"),
        ("raystride train --config lm_pythn", "--config lm_pythn"),
        ("raystride train --train.stepz 3", "raystride train --train.stepz"),
        ("A=1 python ray_jobs/trian.py", "ray_jobs/trian.py"),
        ("make tset && true", "make tset"),
        ("python -m benchmarks.lop", "python -m benchmarks.lop"),
        ("ray job submit --working-dir . -- python ray_jobs/train.py --steps 3", "raystride train --steps"),
    ],
)
def test_a_fault_is_found(line: str, fault: str) -> None:
    block = Block(ROOT / "README.md", 1, "sh", line)
    assert fault in [fault for words in commands(block) for fault in faults(words)]


def settings_of(words: list[str], resumable: set[str]) -> tuple[type, list[str]] | None:
    """The dataclass and the flags of a command of ours that has settings and does not only name a run of before."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if words[:2] == ["ray", "job"] and "--" in words:
        words = words[words.index("--") + 1 :]
    program, *arguments = words or [""]
    if Path(program).name.startswith("python") and arguments[:2] == ["-m", "raystride"]:
        arguments = arguments[2:]
    elif Path(program).name.startswith("python") and arguments[:1] and arguments[0].startswith("ray_jobs/"):
        arguments[0] = Path(arguments[0]).stem
    elif Path(program).name != "raystride":
        return None
    if not arguments or (cls := CLASSES.get(arguments[0])) is None:
        return None
    given = [word for word in words_to_flags(cls, arguments[1:], presets()) if word != "--kernels"]
    run = last_value(given, "run")
    if {"--help", "-h"} & set(given) or any("$" in word for word in given):
        return None
    is_stored = cls is Config and "--config" not in given and (run in resumable or run.isupper())
    resumable.add(run)
    return None if is_stored else (cls, given)


def expanded(text: str) -> str:
    """Shell text with the values of the variables that it sets."""
    for name, value in re.findall(r"""^(\w+)=["']([^"'`]*)["']$""", text, re.MULTILINE):
        text = re.sub(rf"\$({name}\b|{{{name}}})", lambda _, value=value: value, text)  # type: ignore[misc]
    return text


def test_commands_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes through the resolution of its settings, with a stand-in for a file of settings that a reader has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    refused, page, resumable = [], None, set[str]()
    for block in of_kind("sh", "console"):
        if block.page != page:
            page, resumable = block.page, set()
        for words in commands(replace(block, text=expanded(block.text))):
            if (found := settings_of(words, resumable)) is None:
                continue
            for word in found[1]:
                if (file := Path(word)).suffix == ".yaml" and not file.exists():
                    found[1][found[1].index(word)] = str(ROOT / "configs" / "lm_python.yaml")
            try:
                parsed: Parsed[Any] = parse(*found, program="raystride")
                # A model that the page registers has its own data.
                if (
                    found[0] in (Config, SweepJobConfig)
                    and f'"{parsed.settings.task}", model=' not in block.page.read_text()
                ):
                    parsed.require_source()
            except SettingError as error:
                refused.append(f"{block}: {error}")
    assert not refused, "\n".join(refused)


def test_the_page_of_commands_has_each_preset_and_script() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    presets = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert presets == set(re.findall(r"configs/\w+\.yaml", page.partition("## Presets")[2]))
    scripts = {path.stem for path in (ROOT / "ray_jobs").glob("[a-z]*.py")}
    assert scripts < set(re.findall(r"^\| `raystride (\w+)` \|", page, re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_headings_that_are_there() -> None:
    for page in PAGES:
        for target, anchor in some(re.findall(r"\]\(([^)\s:#]*\.md)?#([^)\s]+)\)", page.read_text()) or [("", "")]):
            if anchor:
                there = (page.parent / target) if target else page
                assert anchor in _anchors(there), f"{page.relative_to(ROOT)}: {target}#{anchor}"


def test_every_page_is_found_from_the_first() -> None:
    found, new = set[Path](), {ROOT / "README.md"}
    while new:
        found |= new
        links = {(page, link) for page in new for link in re.findall(r"\]\(([^)\s#:]+\.(?:md|ipynb))", page.read_text())}
        new = {(page.parent / link).resolve() for page, link in links} - found
        new = {page for page in new if page.suffix == ".md"}
    assert not set(PAGES) - found
