"""Code that a stored file names is run only if it is the caller's: each test writes a storage as an attacker would."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import raystride
from raystride.command import run as run_command
from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.config.parse import load_settings, parse
from raystride.pipelines.config.stored import find_stored_folder, mark_stored, stored_names
from raystride.pipelines.data.plugins import load_plugins
from raystride.pipelines.data.stored_code import check_stored_name
from raystride.pipelines.system.storage.sealed import parse_sealed, seal_json
from tests.tiny import write_text

ROOT = Path(__file__).resolve().parents[3]

SETTINGS = {
    "data": {"kind": "text", "validation": "tail", "validation_fraction": 0.1},
    "tokenizer": {"kind": "bytes"},
    "model": {"layers": 1, "heads": 2, "hidden_size": 8, "context": 16},
    "train": {"steps": 2, "slots": 2, "slot_size": 2, "log_every": 2},
    "checkpoint": {"every": 2},
    "launch": {"mode": "inline"},
    "record": {"mlflow": False},
    "sample": {"tokens": 0},
}
OBSERVER = """
import pathlib, raystride
pathlib.Path({mark!r}).touch()

@raystride.register_observer
class Mine(raystride.Observer):
    pass

def same(table):
    return table
"""
Place = Callable[[str, Path], str]


class Victim:
    """A project with a run in its storage, and an attacker who may write that storage."""

    def __init__(self, folder: Path) -> None:
        self.project, self.elsewhere, self.mark = folder / "project", folder / "elsewhere", folder / "it-was-run"
        self.storage = folder / "shared" / "runs"
        self.project.mkdir()
        self.elsewhere.mkdir()
        self.run = self.storage / "base"

    def write_code(self, file: Path) -> Path:
        """Writes a plug-in that leaves a mark where it is run."""
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(OBSERVER.format(mark=str(self.mark)))
        return file

    def store(self, file: Path | None = None, **settings: Any) -> None:
        """Writes these settings into all of the run's files, and the file's hash as if the run had recorded it."""
        for path in self.run.rglob("config.yaml"):
            content = yaml.safe_load(path.read_text())
            content["data"] |= settings.get("data", {})
            path.write_text(yaml.safe_dump(content | {"plugins": settings.get("plugins", [])}))
        names = [*settings.get("plugins", []), *settings.get("data", {}).get("transforms", [])]
        for path in self.run.rglob("environment.json"):
            hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name in names} if file else {}
            written = [hashlib.sha256(each.read_bytes()).hexdigest() for each in self.run.rglob("config.yaml")]
            content = parse_sealed(path.read_bytes(), path.name)
            path.write_bytes(seal_json(content | {"code_sha256": hashes, "settings_sha256": written}))

    def forget_hashes(self) -> None:
        """Makes the run one of 0.3."""
        for path in self.run.rglob("environment.json"):
            content = parse_sealed(path.read_bytes(), path.name)
            del content["code_sha256"], content["settings_sha256"]
            path.write_text(json.dumps(content))

    @property
    def was_run(self) -> bool:
        return self.mark.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a run `base` of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder)
    raystride.train(SETTINGS, {"data.source": str(text)}, run="base", storage=str(folder / "runs"))
    return folder


@pytest.fixture
def victim(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Victim:
    found = Victim(tmp_path)
    shutil.copytree(trained / "runs", found.storage)
    monkeypatch.chdir(found.project)
    return found


def in_storage(name: str, file: Path) -> str:
    return str(file)


def relatively(name: str, file: Path) -> str:
    return f"../shared/runs/base/{name}.py"


def from_python(victim: Victim, **settings: Any) -> raystride.Run:
    return raystride.train(raystride.Run.open("base", str(victim.storage)).settings, settings)


DOORS: dict[str, Callable[[Victim], Any]] = {
    "load_model": lambda victim: raystride.Run.open("base", str(victim.storage)).load_model(),
    "generate": lambda victim: raystride.generate("base", "line", {"sample.tokens": 1}, storage=victim.storage),
    "predict": lambda victim: raystride.predict("base", ["line"], storage=victim.storage),
    "evaluate": lambda victim: raystride.evaluate("base", "validation", {"launch": "inline"}, storage=victim.storage),
    "export": lambda victim: raystride.export("base", "state_dict", str(victim.project / "out"), storage=victim.storage),
    "settings of the run": lambda victim: from_python(victim, **{"train.steps": 4}),
    "settings file": lambda victim: raystride.train(f"{victim.run}/config.yaml", run="base", storage=victim.storage),
    "settings of an attempt": lambda victim: raystride.train(
        str(next((victim.run / "attempts").glob("*/config.yaml"))), run="new", storage=victim.project / "own"
    ),
    "prepare": lambda victim: raystride.prepare(f"{victim.run}/config.yaml", storage=victim.project / "own"),
    "sweep": lambda victim: raystride.sweep(
        f"{victim.run}/config.yaml", {"sweep.space": {"train.slots": [1]}}, run="tried", storage=victim.storage
    ),
}
"""What opens a run or its settings, from Python."""


@pytest.mark.parametrize("place", [in_storage, relatively])
@pytest.mark.parametrize("door", DOORS)
def test_nobody_runs_what_lies_in_a_storage(victim: Victim, door: str, place: Place) -> None:
    name = f"evil_{door.replace(' ', '_')}_{place.__name__}"
    file = victim.write_code(victim.run / f"{name}.py")
    victim.store(file, plugins=[place(name, file)])
    with pytest.raises(raystride.SettingError, match="lies in the storage") as raised:
        DOORS[door](victim)
    assert not victim.was_run
    assert str(file) in str(raised.value)
    assert "--plugins" in str(raised.value)


@pytest.mark.parametrize("words", [("train", "--train.steps", "9"), ("train",), ("evaluate", "--split", "validation")])
def test_commands_that_name_the_run_refuse_it(
    victim: Victim, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file = victim.write_code(victim.run / "evil.py")
    victim.store(file, plugins=[str(file)])
    assert run_command([words[0], "--run", "base", "--storage", str(victim.storage), *words[1:]]) == 2
    assert not victim.was_run
    assert f"{file} lies in the storage {victim.storage}" in (said := capsys.readouterr().err)
    assert f"""--plugins '["{file}"]'""" in said


@pytest.mark.parametrize("form", ["transforms", "sources"])
def test_transforms_of_a_storage_are_not_run(victim: Victim, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the storage is on Python's path, as for who starts a job in it."""
    file = victim.write_code(victim.storage / f"evil_{form}.py")
    monkeypatch.chdir(victim.storage)
    monkeypatch.syspath_prepend("")
    transforms = [f"evil_{form}.same"]
    source = yaml.safe_load((victim.run / "config.yaml").read_text())["data"]["source"]
    mixture = {"source": "python", "sources": {"one": {"source": source, "transforms": transforms}}}
    victim.store(file, data={"transforms": transforms} if form == "transforms" else mixture)
    for door in ("load_model", "settings file"):
        with pytest.raises(raystride.SettingError, match=f"data.transforms: {transforms[0]} is named by the stored"):
            DOORS[door](victim)
    assert not victim.was_run


def test_packages_above_a_module_are_not_run_to_find_it(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    victim.write_code(victim.storage / "evil_package" / "__init__.py")
    file = victim.write_code(victim.storage / "evil_package" / "inner.py")
    monkeypatch.syspath_prepend(str(victim.storage))
    victim.store(file, plugins=["evil_package.inner"])
    with pytest.raises(raystride.SettingError, match="lies in the storage"):
        DOORS["load_model"](victim)
    assert not victim.was_run


def test_only_the_project_and_pythons_path_hold_code(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    file = victim.write_code(victim.elsewhere / "outside.py")
    victim.store(file, plugins=[str(file)])
    with pytest.raises(raystride.SettingError, match="is not in this project"):
        DOORS["load_model"](victim)
    # Who works in a folder in which all users write has no project there.
    monkeypatch.setattr(tempfile, "tempdir", str(victim.project))
    file = victim.write_code(victim.project / "dropped.py")
    victim.store(file, plugins=["dropped.py"])
    with pytest.raises(raystride.SettingError, match="temporary folders left out"):
        DOORS["load_model"](victim)
    link = victim.project / "linked.py"
    link.symlink_to(victim.write_code(victim.run / "linked.py"))
    victim.store(link, plugins=["linked.py"])
    with pytest.raises(raystride.SettingError, match="lies in the storage"):
        DOORS["load_model"](victim)
    assert not victim.was_run


def test_a_file_is_not_replaced_by_one_of_its_base_name(victim: Victim) -> None:
    file = victim.write_code(victim.project / "moved.py")
    victim.store(file, plugins=["/gone/project/moved.py"])
    with pytest.raises(raystride.SettingError, match=r"there is no file '/gone/project/moved\.py'"):
        DOORS["load_model"](victim)
    assert not victim.was_run


def test_a_file_of_the_project_has_the_recorded_hash(victim: Victim) -> None:
    """The run's own plug-in is found by its name; changed, it is the caller who has to name it."""
    own = victim.write_code(victim.project / "own_observer.py")
    trained = raystride.train(
        f"{victim.run}/config.yaml", {"plugins": ["own_observer.py"], "train.steps": 4}, run="base", storage=victim.storage
    )
    hashes = trained.folder.read_json("environment.json")["code_sha256"]
    assert hashes == {"own_observer.py": hashlib.sha256(own.read_bytes()).hexdigest()}
    for name, changes in (("same_file", ""), ("changed_file", "# another line")):
        file = victim.write_code(victim.project / f"{name}.py")
        victim.store(file, plugins=[f"{name}.py"])
        file.write_text(file.read_text() + changes)
    with pytest.raises(raystride.SettingError, match="has another SHA-256 than the run recorded") as raised:
        DOORS["load_model"](victim)
    victim.mark.unlink()
    assert f"""--plugins '["{file}"]'""" in str(raised.value)
    raystride.Run.open("base", str(victim.storage)).load_model(plugins=["changed_file.py"])
    assert victim.was_run, "the caller has named it"
    DOORS["load_model"](victim)  # and this process has loaded it
    victim.store(victim.project / "same_file.py", plugins=["same_file.py"])
    victim.mark.unlink()
    DOORS["load_model"](victim)
    assert victim.was_run, "it is the recorded file"


def test_runs_of_earlier_versions_have_no_hash(victim: Victim, capsys: pytest.CaptureFixture[str]) -> None:
    file = victim.write_code(victim.project / "of_0_3.py")
    victim.store(file, plugins=["of_0_3.py"])
    victim.forget_hashes()
    DOORS["load_model"](victim)
    assert victim.was_run
    assert f"warning: plugins: of_0_3.py has no recorded hash, as runs of 0.3 have none; it is loaded from {file}" in (
        capsys.readouterr().err
    )


def test_nobody_is_told_to_install_a_name_that_is_not_ours_or_given_here() -> None:
    """Whoever takes a free name on the package index gets his code onto the machines of all who follow the line.

    A new line belongs into the list if its names are of `pyproject.toml`, or real packages written out.
    """
    files = [*(ROOT / "pipelines").rglob("*.py"), *(ROOT / "raystride").rglob("*.py"), *(ROOT / "deploy").rglob("*.j2")]
    found = {line for file in files for line in re.findall(r"pip install (?:--\S+ )*([^\n]+)", file.read_text())}
    shown = {re.split(r", |'?\)|\"$| # |; else", line.replace("\\", ""))[0].strip("'\" ") for line in found}
    assert shown == {
        "raystride[serve]",
        "raystride[{package}]",  # of a strategy, by their table
        "raystride[tensorboard]",
        "raystride[{extra}]",  # dedup or languages
        "{package}",  # of SacreBLEU, by a table of that package
        '{packages}"] if packages else []',  # ray and torch
        "onnx onnxscript",
        "nvtx",
        "nvtx==0.2.10; or take a newer Nsight Systems",
        "torch=={plain}{index} (docs/gpus.md",
        '$wheel" "ray[default]=={{ ray_version }}',
    }


def test_names_of_the_caller_are_his(victim: Victim, tmp_path: Path) -> None:
    settings = victim.project / "settings.yaml"
    settings.write_text(yaml.safe_dump({"plugins": ["mine.py"]}))
    assert find_stored_folder(str(settings)) == ""
    assert find_stored_folder(str(victim.run / "config.yaml")) == str(victim.run)
    check_stored_name("/nowhere/mine.py", "plugins")
    # Also in a project that is its own storage.
    (victim.project / ".prepared").mkdir()
    assert find_stored_folder(str(settings)) == ""
    (victim.project / "tried").mkdir()
    for name in ("config.yaml", "recommended.yaml"):
        assert find_stored_folder(str(victim.project / "tried" / name)) == str(victim.project / "tried")
    victim.write_code(victim.project / "mine.py")
    load_plugins(load_settings(Config, str(settings)).settings.plugins)
    assert victim.was_run


def test_all_names_of_stored_settings_are_marked_and_found(victim: Victim, tmp_path: Path) -> None:
    """Of plug-ins, of transforms, and of each source of a mixture; none that the caller has given."""
    sources = {name: {"source": name, "transforms": [f"{name}.one", f"{name}.two"]} for name in ("web", "code")}
    config = Config(plugins=("mine.py", "other.py"), data=DataConfig(sources=sources))
    single = Config(data=DataConfig(transforms=("steps.one", "steps.two")))
    wanted = ["code.one", "code.two", "mine.py", "other.py", "web.one", "web.two"]
    for settings, names in ((config, wanted), (single, ["steps.one", "steps.two"])):
        assert not list(stored_names(settings))
        found = list(stored_names(mark_stored(settings, "the run")))
        assert sorted(found) == names
        assert {name.run for name in found} == {"the run"}
    given = mark_stored(config, "the run", given={"plugins"})
    assert sorted(stored_names(given)) == [name for name in wanted if not name.endswith(".py")]


def test_names_of_a_stored_file_stay_marked_whatever_files_of_the_caller_follow(victim: Victim) -> None:
    file = victim.write_code(victim.project / "stored.py")
    victim.store(file, plugins=[str(file)])
    own = [victim.project / f"{name}.yaml" for name in ("first", "second")]
    for number, place in enumerate(own):
        place.write_text(f"train: {{steps: {number + 3}}}\n")
    stored = str(victim.run / "config.yaml")
    for files in ([stored], [stored, *own], [own[0], stored, own[1]], [*own, stored]):
        arguments = [part for place in files for part in ("--config", str(place))]
        settings = parse(Config, arguments, program="train").settings
        assert [(name, name.run) for name in stored_names(settings)] == [(str(file), str(victim.run))]
    own[1].write_text(yaml.safe_dump({"plugins": [str(file)]}))
    for arguments, count in (
        (["--config", stored, "--config", str(own[1])], 0),  # what comes last counts
        (["--config", str(own[1]), "--config", stored], 1),
        ([f"--plugins={json.dumps([str(file)])}", f"--config={stored}"], 1),
        ([f"--config={stored}", "--plugins", json.dumps([str(file)])], 0),
        (["--config", str(own[1]), "--config", stored, "--config", str(own[0])], 1),
    ):
        assert len(list(stored_names(parse(Config, arguments, program="train").settings))) == count, arguments


def test_files_of_one_name_are_several_plug_ins(victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second was taken for the first, in whose folder the process had been before."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("")
    monkeypatch.chdir(other)
    load_plugins(["mine.py"])
    victim.write_code(victim.project / "mine.py")
    monkeypatch.chdir(victim.project)
    load_plugins(["mine.py"])
    assert victim.was_run
