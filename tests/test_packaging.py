"""Every form of the package holds each module once, runs its own code, and says in one sentence if its links are missing."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.api_page import PAGE
from tests.some import some

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("configs", "deploy", "model", "pipelines", "ray_jobs", "triton_kernels")
"""What `raystride/` links to."""
AT_THE_TOP = ("configs", "ray_jobs")
"""Of that what people name in commands, and a submitted job therefore has at its top, too."""


def _tracked(*places: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.split()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Ray sends to a cluster of this folder, as a ZIP file."""
    from ray._private.runtime_env.packaging import create_package

    place = tmp_path_factory.mktemp("package")
    tree = place / "tree"
    for name in _tracked():  # what lies beside it, such as environments of tests, takes minutes to look through
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    create_package(str(tree), place / "sent.zip", include_gitignore=True)
    return place / "sent.zip"


def test_ray_gets_every_module_once(package: Path) -> None:
    with zipfile.ZipFile(package) as sent:
        names = Counter(name for name in sent.namelist() if not name.endswith("/"))
    assert max(names.values()) == 1
    for module in some(_tracked("model", "pipelines", "triton_kernels", "deploy")):
        assert names[f"raystride/{module}"] == 1, module
        assert names[module] == 0, module
    for module in some(_tracked("raystride/*.py", "raystride/**/*.py", *AT_THE_TOP)):
        assert names[module] == 1, module


def test_a_submitted_job_runs_the_code_that_was_sent(package: Path, tmp_path: Path) -> None:
    """Also from elsewhere, and where another Raystride is installed, as it is here."""
    sent = tmp_path / "sent"
    shutil.unpack_archive(package, sent)
    with (sent / "raystride" / "__init__.py").open("a") as file:
        file.write('\nprint("the code that was sent")\n')
    for place, script in ((sent, "ray_jobs/deploy.py"), (tmp_path, f"{sent}/ray_jobs/deploy.py")):
        done = subprocess.run([sys.executable, script, "--help"], cwd=place, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("the code that was sent\nraystride deploy ")


def test_a_wheel_has_every_module() -> None:
    from setuptools import find_packages

    found = set(find_packages(str(ROOT), include=["raystride*"]))
    for module in some(_tracked("model", "pipelines", "ray_jobs", "triton_kernels")):
        assert f"raystride.{module.rpartition('/')[0].replace('/', '.')}" in found, module


def test_the_linter_looks_at_every_module() -> None:
    ruff = Path(sys.executable).with_name("ruff")
    shown = subprocess.run([ruff, "check", "--show-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    looked_at = {Path(line).resolve().relative_to(ROOT).as_posix() for line in shown.splitlines()}
    assert set(_tracked("*.py")) - looked_at == set()


def test_patterns_of_folders_in_ignore_files_are_anchored() -> None:
    """A pattern `runs/` would take away a package of that name."""
    for name in (".gitignore", ".rayignore"):
        folders = [
            line for line in (ROOT / name).read_text().splitlines() if line.endswith("/") and not line.startswith("#")
        ]
        secret = [line for line in folders if line.startswith(".") or line == "__pycache__/"]
        assert [line for line in some(folders) if not line.startswith("/") and line not in secret] == []


def test_a_clone_without_links_says_so_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "raystride").mkdir()
    for path in (ROOT / "raystride").glob("*.py"):
        shutil.copy(path, tmp_path / "raystride" / path.name)
    for name in LINKED:  # as git writes a link where the file system has none
        (tmp_path / "raystride" / name).write_text(f"../{name}")
    shutil.copytree(ROOT / "ray_jobs", tmp_path / "ray_jobs")
    for command in (["-c", "import raystride"], ["ray_jobs/train.py", "--help"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert "core.symlinks=true" in line


def test_editors_find_the_installed_package() -> None:
    """Pyright, Pylance and jedi follow paths alone; an editable install has a hook of Python's import by default."""
    script = "from importlib.machinery import PathFinder; print(PathFinder.find_spec('raystride').origin)"
    done = subprocess.run([sys.executable, "-I", "-c", script], cwd="/", capture_output=True, text=True, check=False)
    if "NoneType" in done.stderr:
        pytest.fail("raystride is installed without editable_mode=compat: run `make install` again")
    assert Path(done.stdout.strip()).parts[-2:] == ("raystride", "__init__.py")


def test_pyright_takes_the_code_of_the_api_page_and_knows_its_types(tmp_path: Path) -> None:
    """Whoever installs the package has its types in the editor; Pylance is built on pyright."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join([*blocks, "reveal_type(raystride.train('lm_python'))"]))
    # Examples of the reference go on from names that the reader has.
    settings = {"typeCheckingMode": "standard", "reportUndefinedVariable": False, "pythonPlatform": "Linux"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [each["message"] for each in found if each["severity"] == "error"] == []
    (revealed,) = (each["message"] for each in found if each["severity"] == "information")
    assert revealed.endswith('is "Run"')
