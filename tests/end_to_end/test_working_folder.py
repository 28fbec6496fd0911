"""Files of the working folder stand for no library, as whichever user and below whichever launcher a command runs."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import raystride
from raystride import project_folder
from raystride.pipelines.launch.cluster.cluster import token_file
from raystride.pipelines.train.strategies.recompute import _use_cache_of_cpu_type
from tests.tiny import write_text

ROOT = Path(raystride.__file__).parents[1]
TINY = shlex.split(
    "--data.validation tail --tokenizer.kind bpe --tokenizer.vocabulary_size 280 --model.layers 1 --model.heads 2 "
    "--model.hidden_size 16 --model.context 32 --train.steps 2 --train.slots 1 --train.slot_size 4 --validation.every 0 "
    "--sample.tokens 0 --run mine"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a text, and packages with the names of libraries, none of which can be imported."""
    write_text(tmp_path)
    for name in ("tokenizers", "mlflow", "datasets", "torchmetrics"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the {name} of the project')\n")
    return tmp_path


def run_in(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=pytest.mark.long)])
def test_a_command_takes_the_library_and_not_what_has_its_name_here(project: Path, mode: str) -> None:
    """A traceback out of the user's file before, on Ray in the workers too."""
    ended = run_in(project, "-m", "raystride", "train", "--data.source", "text.txt", "--launch.mode", mode, *TINY)
    assert ended.returncode == 0, ended.stderr
    assert "cannot be reached" not in ended.stdout + ended.stderr
    assert (project / "runs" / "mlflow.db").exists()


def test_a_script_whose_folder_hides_a_library_is_refused(project: Path) -> None:
    (project / "mine.py").write_text("import raystride\nraystride.prepare({'data.source': 'text.txt'})\n")
    ended = run_in(project, "mine.py")
    file = project / "datasets" / "__init__.py"
    assert ended.stderr.splitlines()[-1].endswith(
        f"SettingError: 'datasets' is {file} here, which hides the library of that name: rename it, or start elsewhere"
    )


def test_a_folder_without_code_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sacrebleu", "optuna"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "sacrebleu").mkdir()
    assert project_folder.find_hidden_library() is None
    (tmp_path / "optuna.py").touch()
    assert project_folder.find_hidden_library() == ("optuna", str(tmp_path / "optuna.py"))


def test_what_a_library_brings_along_hides_nothing(tmp_path: Path) -> None:
    """Ray puts its own psutil first on the path."""
    write_text(tmp_path)
    script = "import ray._private.worker, sys\nimport raystride\nassert 'thirdparty' in sys.path[0], sys.path\n"
    (tmp_path / "mine.py").write_text(f"{script}print(raystride.project_folder.find_hidden_library())\n")
    ended = run_in(tmp_path, "mine.py")
    assert ended.stdout == "None\n", ended.stderr


def test_the_libraries_are_those_that_the_product_imports() -> None:
    found = set()
    for folder in ("pipelines", "model", "triton_kernels", "raystride", "ray_jobs"):
        for file in (ROOT / folder).glob("**/*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    assert found - set(sys.stdlib_module_names) - {"raystride"} == project_folder.LIBRARIES


def test_a_user_without_a_name_and_a_home_has_a_cache_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with any user id; getpass.getuser ended the training, and Path.home the driver."""
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    _use_cache_of_cpu_type()
    assert f"torchinductor_{os.getuid()}_" in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert token_file().name == "auth_token"


@pytest.mark.weekly
def test_any_user_id_compiles_and_trains(tmp_path: Path) -> None:
    write_text(tmp_path)
    tmp_path.chmod(0o777)
    unshare = ["unshare", "--user", "--map-user=54321", "env", "-u", "USER", "-u", "LOGNAME", "HOME=/nonexistent"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace can be made here")
    command = [*unshare, sys.executable, "-m", "raystride", "train", "--data.source", "text.txt", *TINY]
    ended = subprocess.run([*command, "--train.compile", "block"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_launcher_is_named(tmp_path: Path) -> None:
    """The second process took the run's lease for another training's, and torchrun ended the first."""
    write_text(tmp_path)
    job = (
        "-m",
        "raystride",
        "prepare",
        "--data.source",
        "text.txt",
        "--data.validation",
        "tail",
        "--tokenizer.kind",
        "bytes",
    )
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}
    second = run_in(tmp_path, *job, RANK="1", **torchrun)
    assert (second.returncode, second.stderr) == (
        2,
        "error: this is process 2 of 2 that torchrun has started. Raystride starts its workers itself: run it once, without "
        "torchrun, with --scaling.workers 2\n",
    )
    first = run_in(tmp_path, *job, RANK="0", **torchrun)
    assert first.returncode == 0
    assert "torchrun has started this program 2 times" in first.stderr
    left_over = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    assert run_in(tmp_path, *job, **left_over).stderr == ""
