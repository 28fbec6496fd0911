"""What users of 0.3 have stored works: plug-ins, runs, adapters, exports and deployment files that name modules of then.

`stored-0.3.0.tar.gz` was written by 0.3.0 at commit 64c7177f: four runs of six exact steps (a plug-in's task with its source
and observer; a language model; an adapter over it; a classifier), exports, and four deployments' files.
The export's copy of the package is left out: a process that has imported another Raystride, as a notebook or a service has,
does not read it.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

import raystride
from raystride.old_names import LAST_VERSION, NEW_NAMES, new_name
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from tests.flips import flip_bit, without_hash_lists
from tests.some import some

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "64c7177f7ab52238665323736b08c4d436f22e81"
"""0.3.0, before the eight wings."""
MADE_AT = "/tmp/raystride-0.3.0"
TEXT_TIME_NS = 1_700_000_000_000_000_000
"""When its text was written, which prepared data is known by."""
GONE = ("triton_kernels.", "pipelines.deploy.validate")
"""Modules that left the package: the compilers' tools are in `benchmarks/kernel_tools`, checks of templates in the tests."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder as 0.3 left it, moved to another place; the plug-in's path is relative to it."""
    place = tmp_path_factory.mktemp("stored")
    with tarfile.open(Path(__file__).with_name("stored-0.3.0.tar.gz")) as archive:
        archive.extractall(place, filter="data")
    folder = place / "raystride-0.3.0"
    for file in folder.rglob("*"):
        if file.suffix in (".yaml", ".json", ".jsonl") and file.is_file() and "checkpoints" not in file.parts:
            file.write_text(file.read_text().replace(MADE_AT, str(folder)))
    os.utime(folder / "text.txt", ns=(TEXT_TIME_NS, TEXT_TIME_NS))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def expected(stored: Path) -> dict[str, Any]:
    """What 0.3 itself said of them."""
    content: dict[str, Any] = json.loads((stored / "expected.json").read_text())
    return content


@pytest.mark.parametrize("name", ["plugged", "adapter", "base", "labels"])  # the adapter before its base trains on
def test_a_run_opens_and_goes_on(stored: Path, expected: dict[str, Any], name: str) -> None:
    runs = str(stored / "runs")
    run = raystride.Run.open(name, runs)
    assert run.summary["parameters_sha256"] == expected[name]["parameters_sha256"]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [3, 6]
    prepared = (Folder.from_uri(runs) / ".prepared").names()
    on = raystride.train(f"{run.folder}/config.yaml", {"train.steps": 8}, run=name, storage=runs)
    assert (on.summary["resumed_from"], on.summary["steps"]) == (6, 8)
    assert (Folder.from_uri(runs) / ".prepared").names() == prepared, "nothing was prepared again"
    assert audit(on.folder / "checkpoints").samples == 8 * 8
    sealed = {step for step in (3, 6, 8) if "sha256" in on.folder.read_json(f"checkpoints/step-{step:08}/MANIFEST.json")}
    assert sealed == {8}, "those of 0.3 stay as they are"
    if name == "plugged":
        assert on.metrics("twice_the_step").to_pandas()["twice_the_step"].iloc[-1] == 16.0
        with pytest.warns(FutureWarning, match=r"raystride\.pipelines\.tasks is raystride\.pipelines\.data\.tasks now"):
            _import_anew("raystride.pipelines.tasks")


def test_a_run_under_its_default_name_of_0_3_goes_on_by_the_same_command(stored: Path, tmp_path: Path) -> None:
    """Another learning rate is another run, though 0.3 would have gone on with this one."""
    shutil.copytree(stored / "runs", tmp_path / "runs")
    file = tmp_path / "labels.yaml"
    config = yaml.safe_load((tmp_path / "runs" / "labels" / "config.yaml").read_text())
    file.write_text(yaml.safe_dump(config | {"run": None, "storage": str(tmp_path / "runs")}))
    given = {"train.steps": 8, "launch": "inline"}
    name = load_settings(raystride.Config, str(file), given).settings.default_run_of_0_3("labels")
    (tmp_path / "runs" / "labels").rename(tmp_path / "runs" / name)
    other = given | {"optimizer.learning_rate": 0.5, "train.steps": 2}
    assert raystride.train(str(file), other, storage=tmp_path / "runs").summary["resumed_from"] is None
    run = raystride.train(str(file), given, storage=tmp_path / "runs")
    assert (run.name, run.summary["resumed_from"], run.summary["steps"]) == (name, 6, 8)


def test_a_turned_bit_in_data_that_0_3_prepared_is_refused(stored: Path, tmp_path: Path) -> None:
    """Its shards have lists of hashes; without them, as those of 0.2, the whole file is hashed. Then the run goes on."""
    shutil.copytree(stored / "runs", tmp_path / "runs")
    runs = Folder(str(tmp_path / "runs"))
    prepared = runs / ".prepared" / runs.read_json("labels/environment.json")["data"]
    shard = Path(f"{prepared}/{Manifest.load(prepared).splits['train'][0].file}")
    config = tmp_path / "runs" / "labels" / "config.yaml"
    settings, newest = {"train.steps": 12, "launch": "inline"}, raystride.Run.open("labels", str(runs)).checkpoints[-1].step
    for form in ("with lists", "without"):
        flip_bit(shard, shard.stat().st_size // 2)
        with pytest.raises(raystride.TrainingFailed, match=re.escape(f"{shard}: bytes 0 to")) as failed:
            raystride.train(str(config), settings, run="labels", storage=str(runs))
        assert isinstance(failed.value.cause, raystride.DataError), form
        assert raystride.Run.open("labels", str(runs)).checkpoints[-1].step == newest, form
        flip_bit(shard, shard.stat().st_size // 2)
        without_hash_lists(prepared)
    assert raystride.train(str(config), settings, run="labels", storage=str(runs)).summary["steps"] == 12


def test_the_parameters_are_those_that_were_saved(stored: Path, expected: dict[str, Any]) -> None:
    scores = raystride.evaluate("base", "validation", {"checkpoint": 6}, storage=str(stored / "runs"))
    assert scores.metrics["loss"] == pytest.approx(expected["base"]["val_loss"], rel=1e-3)
    text = raystride.generate(
        "base", "line", {"sample.tokens": 8, "checkpoint": 6, "sample.temperature": 0.0}, storage=str(stored / "runs")
    )
    assert text == expected["text"]


def test_an_mlflow_model_predicts_as_it_did(stored: Path, expected: dict[str, Any]) -> None:
    import mlflow.pyfunc
    import pandas as pd

    model = mlflow.pyfunc.load_model(str(stored / "runs" / "labels" / "export" / "mlflow"))
    answers = model.predict(pd.DataFrame({"text": expected["questions"]})).to_dict("records")
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected["answers"]]
    for found, known in zip(answers, expected["answers"], strict=True):
        assert list(found["probabilities"]) == pytest.approx(known["probabilities"], rel=1e-5)


def test_an_export_names_one_module_of_ours(stored: Path, tmp_path: Path) -> None:
    """No file in a user's hands holds an address that may move."""
    folder = raystride.export("labels", "mlflow", str(tmp_path / "mlflow"), {"checkpoint": 6}, storage=str(stored / "runs"))
    code = (Path(str(folder)) / "served.py").read_text()
    assert re.findall(r"raystride[.\w]*", code) == ["raystride.exported"]


def test_programs_of_deployment_files_run(stored: Path) -> None:
    """Each `python -m` of them starts, and the function that a script imports is there."""
    files = {file: file.read_text() for file in (stored / "deploy").rglob("*") if file.is_file()}
    programs = {name for text in files.values() for name in re.findall(r"-m,? (raystride\.pipelines[.\w]+)", text)}
    assert len(programs) == 4
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    for program in sorted(programs):
        done = subprocess.run(
            [sys.executable, "-m", program, "--help"], env=environment, capture_output=True, text=True, check=True
        )
        assert "usage: raystride node" in done.stdout
        assert "the old name works until" in done.stderr
    (imported,) = [line for text in files.values() for line in re.findall(r'python -c "(.*?)" "\$1"', text)]
    done = subprocess.run(
        [sys.executable, "-c", imported, "127.0.0.1"], env=environment, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+\n", done.stdout)


def test_every_module_has_its_old_name(stored: Path) -> None:
    names = [f"raystride.{line}" for line in (stored / "modules.txt").read_text().splitlines()]
    missing, others = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in some(names):
            try:
                module = import_module(name)
            except ModuleNotFoundError:
                missing.append(name)
                continue
            if module is not import_module(new_name(name)) or module.__spec__.name != new_name(name):  # type: ignore[union-attr]
                others.append(name)
    assert others == []
    assert [name for name in missing if not name.removeprefix("raystride.").startswith(GONE)] == []
    assert [name for name in NEW_NAMES if name not in names] == []


def test_the_page_has_each_row() -> None:
    page = (ROOT / "docs" / "moved.md").read_text()
    rows = [(old, NEW_NAMES[old]) for old in some(NEW_NAMES)]
    short = [[name.removeprefix("raystride.pipelines.") for name in row] for row in rows]
    assert [old for old, new in short if f"| `{old}` | `{new}` |" not in page] == []


def test_deployment_files_name_no_module() -> None:
    texts = {path: path.read_text() for path in some(sorted((ROOT / "deploy").rglob("*"))) if path.is_file()}
    assert [str(path) for path, text in texts.items() if "raystride.pipelines" in text] == []


def test_the_old_names_end_with_0_5() -> None:
    version = tuple(int(part) for part in raystride.__version__.split(".")[:2])
    last = tuple(int(part) for part in LAST_VERSION.split("."))
    assert version <= last, "remove raystride/old_names.py, its table in docs/moved.md, the wait of old files, this test"


def _import_anew(name: str) -> None:
    """Imports an alias as in a process that has not seen it."""
    (finder,) = [finder for finder in sys.meta_path if type(finder).__module__ == "raystride.old_names"]
    finder._named.clear()  # type: ignore[attr-defined]
    del sys.modules[name]
    import_module(name)


FLAGS = shlex.split(
    """
    --data.source text.txt --data.validation tail --train.slots 4 --train.slot_size 2 --model.layers 1 --model.hidden_size 16
    --model.heads 2 --model.context 16 --train.exact true --launch.mode inline --checkpoint.every 2 --checkpoint.keep 2
    --validation.every 2 --record.mlflow false --sample.tokens 0
    """
)


@pytest.fixture(scope="module")
def code_of_0_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of 0.3.0, out of this repository's history."""
    place = tmp_path_factory.mktemp("0.3.0")
    packed = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip("the history of this checkout has no 0.3.0")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place


@pytest.mark.long
def test_a_storage_that_0_3_and_this_version_use_in_turn(code_of_0_3: Path, tmp_path: Path) -> None:
    """Neither finds fewer checkpoints than there are, and the bits are those of a run that this version alone has made."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text that has words in it\n" for number in range(400)))

    def command(package: Path, *words: str) -> str:
        variables = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RAYSTRIDE_"))}
        done = subprocess.run(
            [sys.executable, "-m", "raystride", *words, "--storage", "runs"],
            env=variables | {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def summary(run: str) -> dict[str, Any]:
        return dict(json.loads((tmp_path / "runs" / run / "summary.json").read_text()))

    for steps, package in enumerate((ROOT, code_of_0_3, ROOT, code_of_0_3), start=2):
        said = command(package, "train", "--run", "turns", *FLAGS, "--train.steps", str(2 * steps))
        assert "passed over" not in said
        assert (summary("turns")["resumed_from"] or 2) == 2 * (steps - 1)
    for package in (ROOT, code_of_0_3):
        assert "80 samples" in command(package, "runs", "audit", "turns")
        command(package, "evaluate", "--run", "turns", "--split", "validation")
    command(ROOT, "train", "--run", "alone", *FLAGS, "--train.steps", "10")
    assert summary("turns")["parameters_sha256"] == summary("alone")["parameters_sha256"]
