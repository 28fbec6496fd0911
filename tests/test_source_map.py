"""The tests that a change needs, from a map of what test files ran; and the files that a traced process notes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import source_map, source_trace
from tests.seconds import group_of
from tests.source_map import (
    BUDGET_S,
    load_map,
    mirrored_tests,
    rank_unmapped,
    select_tests,
    unmapped_tests,
    within_budget,
)

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


@pytest.mark.parametrize(
    ("test", "source", "rank"),
    [
        ("tests/pipelines/data/feed/test_loader.py", ORDER, 4),
        ("tests/pipelines/train/own_model/test_fit.py", ORDER, 5),
        ("tests/pipelines/train/own_model/test_fit.py", "pipelines/train/loop.py", 5),
        ("tests/pipelines/train/own_model/test_fit.py", "model/loss.py", 5),
        ("tests/pipelines/train/own_model/test_fit.py", "pipelines/launch/train_job.py", None),
        ("tests/model/test_loss.py", ORDER, None),
        ("tests/end_to_end/test_library.py", ORDER, 5),
        ("tests/end_to_end/test_library.py", "raystride/api.py", 5),
        ("tests/test_packaging.py", "configs/lm_python.yaml", 5),
        ("tests/end_to_end/test_library.py", "tests/end_to_end/tracking.py", 4),
        ("tests/model/test_loss.py", "tests/end_to_end/tracking.py", None),
        ("tests/model/test_loss.py", "tests/tiny.py", 4),
        ("tests/end_to_end/test_library.py", "LICENSE", None),
    ],
)
def test_a_test_that_the_map_lacks_needs_its_package_and_what_its_layer_may_import(
    test: str, source: str, rank: int | None
) -> None:
    assert rank_unmapped(test, source) == rank


def test_tests_that_the_map_lacks_come_after_those_that_run_a_changed_file() -> None:
    lacking = ["tests/end_to_end/test_library.py", "tests/model/test_block.py", "tests/pipelines/data/feed/test_loader.py"]
    assert select_tests([ORDER], KNOWN, lacking) == [*list(KNOWN)[:3], lacking[2], lacking[0]]


def test_the_map_has_nearly_all_test_files() -> None:
    """A dozen new files are no reason to make it anew: they are chosen by their packages."""
    lacking = unmapped_tests(load_map())
    assert len(lacking) <= 12, f"make test-map makes it anew; it lacks {lacking}"


def test_a_changed_test_comes_before_all_others() -> None:
    assert select_tests([ORDER, "tests/model/test_loss.py"], KNOWN)[0] == "tests/model/test_loss.py"


def test_what_does_not_fit_is_left_out_and_named() -> None:
    seconds = {"a": {"usual": BUDGET_S + 1}, "b": {"usual": 1.0}, "c": {"usual": BUDGET_S}}
    assert within_budget(["a"], seconds) == (["a"], [])
    assert within_budget(["b", "c", "b2"], seconds) == (["b", "b2"], ["c"])


def test_a_test_file_without_usual_tests_has_a_key(tmp_path: Path) -> None:
    (tmp_path / "collected.tsv").write_text(f"{ORDER_TESTS}\t\ntests/model/test_gone.py\t\n")
    found = source_map.read_traces(tmp_path)
    assert found == {ORDER_TESTS: set()}
    assert ORDER_TESTS in unmapped_tests({})
    assert ORDER_TESTS not in unmapped_tests(found)


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


def test_threads_and_a_second_test_file_are_noted(tmp_path: Path) -> None:
    """Each test file sees anew what ran, also in threads that began before it."""
    program = f"""
import os, queue, threading
from pathlib import Path
from tests import source_trace
from tests.source_map import mirrored_tests
folder = Path(os.environ["RAYSTRIDE_MAP"])
(folder / "current").write_text({ORDER_TESTS!r})
trace = source_trace.start()
assert source_trace.start() is None
asked, answers = queue.Queue(), queue.Queue()
def answer():
    while (source := asked.get()):
        answers.put(mirrored_tests(source))
threading.Thread(target=answer).start()
asked.put({ORDER!r})
answers.get()
(folder / "current").write_text("tests/model/test_loss.py")
trace.restart()
asked.put({ORDER!r})
answers.get()
asked.put("")
"""
    variables = {"RAYSTRIDE_MAP": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], cwd=source_trace.ROOT, env=variables, check=True)
    found = source_map.read_traces(tmp_path)
    assert "tests/source_map.py" in found[ORDER_TESTS]
    assert "tests/source_map.py" in found["tests/model/test_loss.py"]
