"""The code keeps to docs/house.md: arrows, sizes, prologues, docstrings, paths, the map, and what imports without what."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["triton_kernels", "model", "pipelines", "ray_jobs"]
"""From the inside out: each may import those before it."""
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
LIBRARY = sorted((ROOT / "raystride").glob("*.py"))
"""Beside the links to the packages."""
ALL = MODULES + LIBRARY + [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _faults(paths: Iterable[Path], wrong: Callable[[Path], object]) -> dict[str, object]:
    """What is wrong with each of these files, by file."""
    found = {_id(path): wrong(path) for path in paths}
    return {file: fault for file, fault in found.items() if fault}


@cache
def _imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_arrows_between_packages_point_one_way() -> None:
    def outside(path: Path) -> set[str]:
        own = PACKAGES.index(path.relative_to(ROOT).parts[0])
        named = {name.removeprefix("raystride.").split(".")[0] for name in _imports(path)}
        return named & {"tests", "benchmarks", *PACKAGES[own + 1 :]}

    assert not _faults(MODULES, outside)


def test_our_packages_are_imported_below_raystride() -> None:
    """Under two names a class would be two classes; a folder says so when it is imported by its own name."""
    assert not _faults(ALL, lambda path: {name.split(".")[0] for name in _imports(path)} & set(PACKAGES))


@pytest.mark.parametrize("package", ["model", "pipelines", "triton_kernels"])
def test_a_folder_imported_by_its_own_name_says_the_right_one(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith(f"ImportError: import raystride.{package}, not {package}")


def test_one_file_reaches_into_private_parts_of_ray() -> None:
    """By import, by name in a text, or by a name of Ray's that no page of its documentation has."""
    private = re.compile(r"\bray\.[\w.]*\b_\w+|_raylet|ray\.core\b|ray\.train\.v2|__internal|_JSON_ENV_VAR")
    assert list(_faults(MODULES, lambda path: private.findall(path.read_text()))) == ["pipelines/cluster/internals.py"]


@cache
def _graph() -> dict[str, set[str]]:
    """Modules of `pipelines`, and which of them each imports, at its top or inside a function."""
    modules = {
        "raystride." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in MODULES
        if path.is_relative_to(ROOT / "pipelines")
    }
    uses: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in modules else node.module for name in named}
        uses[name] = (found & set(modules)) - {name}
    return uses


def _circle(uses: dict[str, set[str]]) -> list[str] | None:
    """Names of which each uses the next, and the last the first; None where there are none such."""
    try:
        list(TopologicalSorter(uses).static_order())
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not _circle(_graph())


def test_no_rooms_import_each_other_in_a_circle() -> None:
    uses: dict[str, set[str]] = defaultdict(set)
    for name, others in _graph().items():
        room, *rooms = ([*module.split("."), ""][2] for module in (name, *others))
        uses[room] |= set(rooms) - {room, ""}
    assert len(uses) > 20
    assert not _circle(uses)


def test_files_and_functions_are_short_and_have_a_prologue() -> None:
    def wrong(path: Path) -> list[str]:
        tree = _tree(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [node.name for node in functions if (node.end_lineno or 10**6) - node.lineno >= 60]
        found += ["its length"] * (path.read_text().count("\n") > 400)
        return found + ["its prologue"] * (not ast.get_docstring(tree) and bool(tree.body))

    assert not _faults(ALL, wrong)


def _public_functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in _tree(path).body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _is_decorated(node: ast.AST, word: str) -> bool:
    return isinstance(node, ast.FunctionDef) and word in map(ast.unparse, node.decorator_list)


def test_what_is_public_has_a_docstring() -> None:
    def without(path: Path) -> list[str]:
        public = [node for node in _tree(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        named = [node for node in public if not node.name.startswith("_") and not _is_decorated(node, "overload")]
        return [node.name for node in named if not ast.get_docstring(node)]

    assert not _faults(MODULES, without)


def test_a_public_function_that_raises_says_so() -> None:
    """What it raises itself; `raise SystemExit`, and errors that mean a mistake of ours, need no word."""

    def silent(path: Path) -> list[str]:
        found = []
        for node in _public_functions(path):
            calls = [each.exc for each in ast.walk(node) if isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call)]
            raised = {ast.unparse(call.func) for call in calls} - {"SystemExit", "AssertionError", "NotImplementedError"}
            if raised and "aise" not in (ast.get_docstring(node) or ""):
                found.append(f"{node.name} raises {', '.join(raised)}")
        return found

    assert not _faults(MODULES, silent)


def test_what_is_public_has_types() -> None:
    """mypy lets kernels go without, as Python knows no types for what they work on; their public functions may not."""

    def without(path: Path) -> list[str]:
        found = []
        for node in _public_functions(path):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            whole = all([node.returns, *(argument.annotation for argument in arguments)])
            found += [node.name] * (not whole and not _is_decorated(node, "jit"))
        return found

    assert not _faults(MODULES, without)


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines" / "config").glob("*.py")), ids=_id)
def test_every_setting_has_a_docstring(path: Path) -> None:
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.dump(item) for item in node.decorator_list):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.dump(field.annotation):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{node.name}.{ast.unparse(field.target)}"


def test_no_public_name_stands_in_two_modules() -> None:
    """But for `main`, and for what the library passes on under the name of what it calls."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for node in _tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
                found[node.name].add(_id(path))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_settings_are_frozen() -> None:
    from raystride.pipelines.config import Config

    assert is_dataclass(Config)
    assert Config.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_no_room_is_named_after_nothing() -> None:
    nothing = {"utils", "helpers", "common", "base", "misc"}
    assert not _faults(ALL, lambda path: nothing & set(path.relative_to(ROOT).with_suffix("").parts))


def _named_paths(page: Path) -> set[str]:
    """Paths that a page names: in code quotes, and in the tree of the house."""
    text = page.read_text()
    quoted = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text))
    commands = set(re.findall(r"\b((?:ray_jobs|configs|docs|benchmarks|tests|deploy)/[\w./-]*\.\w+)", text))
    modules = {name.replace(".", "/") for name in re.findall(r"python -m ((?:benchmarks|raystride)[\w.]+)", text)}
    packages = {name for name in modules if (ROOT / name).is_dir()}
    return quoted | commands | {f"{name}.py" for name in modules - packages} | {f"{name}/__main__.py" for name in packages}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    missing = {
        path
        for path in _named_paths(page)
        if not (ROOT / path).exists() and not path.startswith(("runs/", ".venv/", "attempts/", "journal/", "profiles/"))
    }
    assert not missing


@pytest.mark.parametrize("page", [*PAGES, ROOT / "deploy" / "monitoring" / "README.md"], ids=_id)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def _shares() -> dict[str, tuple[float, float]]:
    """Of CONTRIBUTING.md: which minutes each group of tests may take, in `make test` and beyond it."""
    rows = re.findall(r"^\| `(tests/[^`]+)` \| ([\d.]+) \| ([\d.]+) \|", PAGES[-1].read_text(), re.MULTILINE)
    return {group: (float(usual), float(long)) for group, usual, long in rows}


def test_every_test_belongs_to_a_group_that_has_its_share() -> None:
    shares = _shares()
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != ROOT / "tests"]
    groups = {file: [group for group in shares if _id(file).startswith(f"{group}/")] for file in files}
    assert not {_id(file) for file, found in groups.items() if not found}
    assert not set(shares) - {group for found in groups.values() for group in found}, "in the table, not in the folder"


def test_the_shares_of_the_groups_stay_below_the_whole() -> None:
    usual, long = (sum(minutes) for minutes in zip(*_shares().values(), strict=True))
    assert round(usual, 1) <= 8
    assert round(usual + long, 1) <= 40


def test_the_readme_is_for_newcomers() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    installed, activated = text.index("make train"), text.index("source .venv/bin/activate")
    assert installed < activated < text.index("raystride train"), "what needs the environment stands after its activation"


def _map() -> set[str]:
    """Every path on the map of docs/house.md. A line names files, or a room, below what is less indented than itself."""
    tree = re.search(r"```\n(.*?)```", (ROOT / "docs" / "house.md").read_text(), re.DOTALL)
    assert tree
    found: set[str] = set()
    above: list[tuple[int, str]] = []
    for line in tree[1].splitlines():
        named = re.match(r"( *)((?:[\w.]+(?:/|\.py)(?: +|$))+)", line)
        if not named:
            continue
        while above and above[-1][0] >= len(named[1]):
            above.pop()
        inside = above[-1][1] if above else ""
        names = named[2].split()
        found |= {inside + name for name in names}
        if names[0].endswith("/"):
            above.append((len(named[1]), inside + names[0]))
    return found


@pytest.mark.parametrize("package", [*PACKAGES, "raystride"])
def test_every_file_is_on_the_map_in_its_room(package: str) -> None:
    shown = {path for path in _map() if path.startswith(f"{package}/") and path.endswith(".py")}
    there = {_id(path) for path in MODULES + LIBRARY if path.name != "__init__.py" and _id(path).startswith(f"{package}/")}
    assert not there - shown, "in the folder, not on the map"
    assert not shown - there, "on the map, not in the folder"


MIRRORED = [path for package in PACKAGES for path in sorted((ROOT / "tests" / package).rglob("test_*.py"))]


def test_tests_lie_where_what_they_test_lies() -> None:
    """A module of the same room, or one of the tests' own beside it. What tests several lies in tests/end_to_end."""

    def astray(path: Path) -> bool:
        tested = path.name.removeprefix("test_")
        room = ROOT / path.parent.relative_to(ROOT / "tests")
        return not (room / tested).exists() and not path.with_name(tested).exists()

    assert not _faults(MIRRORED, astray)


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


def test_observers_and_senders_import_without_the_heavy_libraries() -> None:
    program = """
import sys
for name in ("ray", "mlflow", "psutil", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from raystride.pipelines.observers.observer import RunFacts
from raystride.pipelines.observers.ray_metrics import RayMetrics
from raystride.pipelines.record import Sender
import raystride.pipelines.report
metrics = RayMetrics()
metrics.on_start(RunFacts(run="r", attempt="a1"))
metrics.on_log(1, {"train_loss": 1.0})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
