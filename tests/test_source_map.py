"""The tests that a change needs, from a map of what test files ran; and the files that a traced process notes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import source_map, source_trace
from tests.seconds import group_of
from tests.source_map import BUDGET_S, mirrored_tests, select_tests, within_budget

ORDER, ORDER_TESTS = "pipelines/data/feed/order.py", "tests/pipelines/data/feed/test_order.py"
KNOWN = {
    ORDER_TESTS: {ORDER},
    "tests/pipelines/data/feed/test_plan.py": {ORDER, "pipelines/data/feed/plan.py"},
    "tests/end_to_end/test_jobs.py": {ORDER, "pipelines/data/feed/plan.py", "configs/lm_python.yaml"},
    "tests/pipelines/config/test_parse.py": {"configs/lm_python.yaml"},
    "tests/model/test_loss.py": {"model/loss.py"},
}


def test_a_module_has_its_own_tests_first_and_then_the_most_specific_ones() -> None:
    assert select_tests([ORDER], KNOWN) == list(KNOWN)[:3]


def test_a_preset_has_the_tests_that_opened_it() -> None:
    assert select_tests(["configs/lm_python.yaml"], KNOWN) == list(KNOWN)[3:1:-1]


def test_a_file_that_the_map_does_not_know_has_the_tests_of_its_package() -> None:
    found = select_tests(["pipelines/data/feed/new_module.py"], KNOWN)
    assert ORDER_TESTS in found
    assert all(test.startswith("tests/pipelines/data/feed/") for test in found)
    assert mirrored_tests("pipelines/data/feed/deeper/new_module.py") == mirrored_tests("pipelines/data/feed/new_module.py")
    assert select_tests(["LICENSE"], KNOWN) == []


def test_a_changed_test_comes_before_all_others() -> None:
    assert select_tests([ORDER, "tests/model/test_loss.py"], KNOWN)[0] == "tests/model/test_loss.py"


def test_what_does_not_fit_is_left_out_and_named() -> None:
    seconds = {"a": {"usual": BUDGET_S + 1}, "b": {"usual": 1.0}, "c": {"usual": BUDGET_S}}
    assert within_budget(["a"], seconds) == (["a"], [])
    assert within_budget(["b", "c", "b2"], seconds) == (["b", "b2"], ["c"])


def test_the_map_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_map, "MAP_FILE", tmp_path / "map.json")
    source_map.write_map(KNOWN)
    assert source_map.load_map() == KNOWN


def test_paths_of_links_and_of_installed_packages_are_those_of_the_project() -> None:
    assert source_trace.relative_path(f"{source_trace.ROOT}/raystride/pipelines/data/feed/order.py") == ORDER
    assert source_trace.relative_path("/site-packages/raystride/pipelines/data/feed/order.py") == ORDER
    assert source_trace.relative_path("/site-packages/raystride/api.py") == "raystride/api.py"
    assert source_trace.relative_path(f"{source_trace.ROOT}/tests/tiny.py") == "tests/tiny.py"
    assert source_trace.relative_path("/site-packages/torch/nn/__init__.py") is None


def test_seconds_are_summed_by_package() -> None:
    assert group_of(ORDER_TESTS) == "tests/pipelines/data/feed"
    assert group_of("tests/pipelines/train/test_loop.py") == "tests/pipelines/train"
    assert group_of("tests/model/deeper/test_loss.py") == "tests/model"
    assert group_of("tests/test_source_map.py") == "tests"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_forked_process_notes_what_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "current").write_text(ORDER_TESTS)
    program = """
import os
from raystride.pipelines.system.storage import retries
from tests import source_trace
source_trace.start()
if os.fork() == 0:
    from tests.source_map import mirrored_tests
    mirrored_tests("pipelines/data/feed/order.py")
    open("configs/lm_python.yaml").close()
    os.kill(os.getpid(), 9)
os.wait()
"""
    variables = {"RAYSTRIDE_MAP": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], cwd=source_trace.ROOT, env=variables, check=True)
    found = source_map.read_traces(tmp_path)[ORDER_TESTS]
    assert {"tests/source_map.py", "configs/lm_python.yaml"} <= found
