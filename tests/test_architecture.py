"""Rules of the code that no linter knows: private parts of Ray, settings, paths and links of pages, light imports.

Ruff, mypy and import-linter hold the others: `make lint`.
"""

import ast
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from tests import architecture_map

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["triton_kernels", "model", "pipelines", "ray_jobs", "raystride"]
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_few_files_reach_into_private_parts_of_ray() -> None:
    """By import, by name in a text, or by a name of Ray's that no page of its documentation has."""
    private = re.compile(r"\bray\.[\w.]*\b_\w+|_raylet|ray\.core\b|ray\.train\.v2|__internal|_JSON_ENV_VAR")
    found = [_id(path) for path in MODULES if private.search(path.read_text())]
    # The last orders a worker's path before anything of the pipelines is imported.
    cluster = [f"pipelines/launch/cluster/{name}.py" for name in ("fast_start", "internals")]
    assert found == [*cluster, "raystride/project_folder.py"]


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


def test_a_function_that_reads_one_section_of_the_settings_takes_that_section() -> None:
    """Not `config: Config` if nothing but `config.data` is read, but `data: DataConfig`."""
    from raystride.pipelines.config import Config

    sections = {field.name for field in fields(Config) if is_dataclass(field.default)}
    functions = [
        (path, function)
        for path in MODULES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(argument.arg == "config" and "Config" in ast.dump(argument) for argument in function.args.args)
    ]
    assert len(functions) > 50
    for path, function in functions:
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "config"]
        read = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.value in uses]
        names = {node.attr for node in read}
        assert len(read) < len(uses) or len(names) != 1 or not names <= sections, (
            f"{_id(path)}: {function.name} reads {names}"
        )


MAX_WITH_ALL_SETTINGS = 138
"""Parameters that are the whole `Config`; lower it with each that goes."""


def test_few_functions_take_all_settings() -> None:
    """Those with one or two sections show on which settings their result depends."""
    found = [
        f"{_id(path)}: {function.name}"
        for path in MODULES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation and re.fullmatch("'?Config'?( [|] None)?", ast.unparse(argument.annotation))
    ]
    assert len(found) <= MAX_WITH_ALL_SETTINGS, "take the sections that are read: " + ", ".join(found)


def test_the_page_of_architecture_has_the_sentences_of_the_code() -> None:
    assert architecture_map.PAGE.read_text() == architecture_map.page(), "make map writes it anew"
    picture = (ROOT / "docs" / "pictures" / "wings.svg").read_text()
    drawn = [name for name in re.findall(r">([a-z]+)</text>", picture) if (ROOT / "pipelines" / name).is_dir()]
    assert drawn[::-1] == architecture_map.list_wings()


def _is_silent(node: ast.AST) -> bool:
    """Returns whether a node suppresses every error without a word."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
        return not {"Exception", "BaseException"}.isdisjoint(map(ast.unparse, node.args))
    if not isinstance(node, ast.ExceptHandler) or not all(isinstance(line, ast.Pass | ast.Continue) for line in node.body):
        return False
    return not node.type or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type)) is not None


def test_no_loop_suppresses_every_error() -> None:
    """Or what it does never works, and nobody hears of it: a narrower error is named, or `ServiceThread` runs the loop."""
    silent = [
        f"{_id(path)}:{node.lineno}"
        for path in MODULES
        for loop in ast.walk(ast.parse(path.read_text()))
        if isinstance(loop, ast.For | ast.AsyncFor | ast.While)
        for node in ast.walk(loop)
        if _is_silent(node)
    ]
    assert silent == []


FIGURES = (
    *("train/", "val/", "start/", "test_recall/", "val_recall/"),
    *("expert_load/", "gradient_norm/", "update_norm/", "tokens_seen/"),
)
"""Beginnings of figures' names, in the journal and in MLflow."""


def _named_paths(page: Path) -> set[str]:
    """Paths that a page names: in code quotes, and in the map."""
    text = page.read_text()
    quoted = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text))
    commands = set(re.findall(r"\b((?:ray_jobs|configs|docs|benchmarks|tests|deploy)/[\w./-]*\.\w+)", text))
    modules = {name.replace(".", "/") for name in re.findall(r"python -m ((?:benchmarks|raystride)[\w.]+)", text)}
    packages = {name for name in modules if (ROOT / name).is_dir()}
    return quoted | commands | {f"{name}.py" for name in modules - packages} | {f"{name}/__main__.py" for name in packages}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "settings"], ids=_id)
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    missing = {
        path
        for path in _named_paths(page)
        if not (ROOT / path).exists()
        and not path.startswith(("runs/", "build/", ".venv/", "attempts/", "journal/", "profiles/", *FIGURES))
    }
    assert not missing


@pytest.mark.parametrize("page", [*PAGES, ROOT / "deploy" / "monitoring" / "README.md"], ids=_id)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def _names_of(module: str) -> set[str] | None:
    """The names that a module of ours has, or a package with its modules; None if it has others as well, or is not ours."""
    path = ROOT / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return set()
    names = {child.stem for child in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            if node.name == "__getattr__":
                return None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_what_no_type_checker_reads_imports_what_is_there() -> None:
    """Benchmarks and examples, which tests do not run: a name that moved ended `benchmarks.loop` at its first import."""
    missing = []
    for path in (path for folder in ("benchmarks", "examples", "deploy", "docs") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.partition(".")[0] in ("raystride", "benchmarks") and (names := _names_of(module)) is not None:
                missing += [f"{_id(path)}: {module}.{a.name}" for a in node.names if a.name not in names]  # type: ignore[attr-defined]
    assert not missing


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
from raystride.pipelines import config; from raystride.pipelines.data import tasks
from raystride.pipelines.data.feed import cache, loader
from raystride.pipelines.train.strategies import ddp, strategy
from raystride.pipelines.train.memory import estimate
from raystride.pipelines.train import loop, validation
from raystride.pipelines.train.checkpoint import pieces as fingerprint, manager, writer
from raystride.pipelines.train.worker import run
from raystride.pipelines.launch import inline
import benchmarks.gpu
assert not BLOCKED & {name.split(".")[0] for name in sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_the_driver_needs_no_torch() -> None:
    program = (
        "import sys, raystride.pipelines.launch.train_job; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_observers_and_senders_import_without_the_heavy_libraries() -> None:
    program = """
import sys
for name in ("ray", "mlflow", "psutil", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.observers.ray_metrics import RayMetrics
from raystride.pipelines.observability.record import Sender
import raystride.pipelines.observability.report
metrics = RayMetrics()
metrics.on_start(RunFacts(run="r", attempt="a1"))
metrics.on_log(1, {"train_loss": 1.0})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
