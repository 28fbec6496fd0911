"""The code keeps to docs/house.md: arrows, sizes, prologues, docstrings, paths, and what imports without what."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["triton_kernels", "model", "pipelines", "ray_jobs"]
"""From the inside out: each may import those before it."""
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
ALL = MODULES + [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_arrows_between_packages_point_one_way(path: Path) -> None:
    own = PACKAGES.index(path.relative_to(ROOT).parts[0])
    outside = {"tests", "benchmarks", *PACKAGES[own + 1 :]}
    assert not {name.removeprefix("raystride.").split(".")[0] for name in _imports(path)} & outside


@pytest.mark.parametrize("path", ALL, ids=_id)
def test_our_packages_are_imported_below_raystride(path: Path) -> None:
    """Under two names a class would be two classes; a folder says so when it is imported by its own name."""
    assert not {name.split(".")[0] for name in _imports(path)} & set(PACKAGES)


@pytest.mark.parametrize("package", ["model", "pipelines", "triton_kernels"])
def test_a_folder_imported_by_its_own_name_says_the_right_one(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"ImportError: import raystride.{package}, not {package}")


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_one_file_reaches_into_private_parts_of_ray(path: Path) -> None:
    """By import, by name in a text, or by a name of Ray's that no page of its documentation has."""
    private = re.findall(
        r"\bray\.[\w.]*\b_\w+|_raylet|ray\.core\b|ray\.train\.v2|__internal|_JSON_ENV_VAR", path.read_text()
    )
    assert not private or path == ROOT / "pipelines" / "cluster" / "internals.py"


def test_no_two_rooms_import_each_other() -> None:
    uses: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "pipelines").rglob("*.py"):
        room = path.relative_to(ROOT / "pipelines").parts[0].removesuffix(".py")
        for name in _imports(path):
            if name.startswith("raystride.pipelines.") and name.split(".")[2] != room:
                uses[room].add(name.split(".")[2])
    both = {tuple(sorted((a, b))) for a in uses for b in uses[a] if a in uses.get(b, set())}
    assert not both


@pytest.mark.parametrize("path", ALL, ids=_id)
def test_files_and_functions_are_short_and_have_a_prologue(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 400
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name
    assert ast.get_docstring(tree) or not tree.body


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_what_is_public_has_a_docstring(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_what_is_public_has_types(path: Path) -> None:
    """mypy lets kernels go without, as Python knows no types for what they work on; their public functions may not."""
    for node in ast.parse(path.read_text()).body:
        kernel = isinstance(node, ast.FunctionDef) and "jit" in map(ast.unparse, node.decorator_list)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not kernel:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert all([node.returns, *(argument.annotation for argument in arguments)]), node.name


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines" / "config").glob("*.py")), ids=_id)
def test_every_setting_has_a_docstring(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.dump(item) for item in node.decorator_list):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.dump(field.annotation):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{node.name}.{ast.unparse(field.target)}"


def test_settings_are_frozen() -> None:
    from raystride.pipelines.config import Config

    assert is_dataclass(Config)
    assert Config.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ALL, ids=_id)
def test_no_room_is_named_after_nothing(path: Path) -> None:
    assert not {"utils", "helpers", "common", "base", "misc"} & set(path.with_suffix("").parts)


def _named_paths(page: Path) -> set[str]:
    """Paths that a page names: in code quotes, and in the tree of the house."""
    text = page.read_text()
    quoted = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text))
    commands = set(re.findall(r"\b((?:ray_jobs|configs|docs|benchmarks|tests|deploy)/[\w./-]*\.\w+)", text))
    modules = {f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m ((?:benchmarks|raystride)[\w.]+)", text)}
    return quoted | commands | modules


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    missing = {
        path
        for path in _named_paths(page)
        if not (ROOT / path).exists() and not path.startswith(("runs/", ".venv/", "attempts/", "journal/", "profiles/"))
    }
    assert not missing


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs" / "house.md").read_text()
    rooms = [path.name for path in (ROOT / "pipelines").iterdir() if (path / "__init__.py").exists()]
    jobs = [path.name for path in (ROOT / "ray_jobs").glob("*.py") if path.name != "__init__.py"]
    assert not [room for room in rooms if f"  {room}/" not in text]
    assert not [job for job in jobs if f"  {job}" not in text]


def test_the_loop_imports_with_torch_and_numpy_alone() -> None:
    """On a machine without Ray, MLflow, pyarrow and jsonargparse everything from the settings to the loop is there."""
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError("blocked: " + name)
BLOCKED = {"ray", "mlflow", "pyarrow", "jsonargparse", "datasets", "tokenizers", "tiktoken", "psutil", "rich", "matplotlib",
           "pynvml", "fsspec", "safetensors", "deepspeed"}
sys.meta_path.insert(0, Block())
import raystride.model.transformer, raystride.model.generate, raystride.triton_kernels.attention
from raystride.pipelines import config, tasks
from raystride.pipelines.feed import cache, loader
from raystride.pipelines.strategies import ddp, strategy
from raystride.pipelines.memory import estimate
from raystride.pipelines.train import checkpoint, fingerprint, loop, storage, validation
from raystride.pipelines.worker import worker
from raystride.pipelines.launch import inline
import benchmarks.gpu
assert not BLOCKED & {name.split(".")[0] for name in sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_the_driver_needs_no_torch() -> None:
    program = "import sys, raystride.pipelines.launch.driver; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
