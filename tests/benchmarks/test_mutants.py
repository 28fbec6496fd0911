"""Faults are drawn alike by the same seed, leave a Python source, and are found again when lines have moved."""

import ast
import subprocess
from pathlib import Path

import pytest

from benchmarks.mutants import (
    PACKAGES,
    ROOT,
    Copy,
    draw_faults,
    draw_packages,
    find_again,
    find_tests,
    make_table,
    read_by_hand,
    read_equivalent,
    share_out,
    try_fault,
)
from benchmarks.mutation_operators import find_faults
from benchmarks.pytest_server import PytestServer
from tests.some import some

SOURCE = '''
"""1 < 2"""

LIMIT: int = 3


def count(values: list[int], *, most: int = 8) -> int:
    """The values below `most`, and no more than 3."""
    total = 0
    for value in values:
        if value < most and not value == 2:
            total += 1
    if total > LIMIT:
        raise ValueError(f"{total + 1} are more than 3" + "!")
    total = min(total, most)
    print("counted", total, sep="=")
    return sorted(values, key=abs, reverse=True)[0] if total else -1
'''


def _made(source: str) -> dict[str, list[str]]:
    """The changed lines that each operator makes of a source."""
    found: dict[str, list[str]] = {}
    for fault in find_faults("x.py", source):
        changed = zip(source.splitlines(), fault.apply(source).splitlines(), strict=True)
        found.setdefault(fault.operator, []).extend(after.strip() for before, after in changed if before != after)
    return found


def test_the_faults_of_a_source_are_those_that_stand_here() -> None:
    made = _made(SOURCE)
    assert made["< to <="] == ["if value <= most and not value == 2:"]
    assert made["and to or"] == ["if value < most or not value == 2:"]
    assert made["== to !="] == ["if value < most and not value != 2:"]
    assert made["not left out"] == ["if value < most and (value == 2):"]
    assert made["> to >="] == ["if total >= LIMIT:"]
    assert made["+= to -="] == ["total -= 1"]
    assert made["min to max"] == ["total = max(total, most)"]
    assert made["without key"] == ["return sorted(values, reverse=True)[0] if total else -1"]
    assert made["without reverse"] == ["return sorted(values, key=abs)[0] if total else -1"]
    assert made["True and False swapped"] == ["return sorted(values, key=abs, reverse=False)[0] if total else -1"]
    assert made["statement left out"] == ["pass", "pass"], "the sum and the bound, but not what binds a name first"
    assert made["returns None"] == ["return None"]
    assert "def count(values: list[int], *, most: int = 9) -> int:" in made["one more"]
    assert "LIMIT: int = 4" in made["one more"]
    assert len(made["condition negated"]) == 3
    assert set(made) == {
        "< to <=", "and to or", "== to !=", "not left out", "> to >=", "+= to -=", "min to max", "without key",
        "without reverse", "True and False swapped", "statement left out", "returns None", "one more", "one less",
        "condition negated", "- left out",
    }, "and none in texts, errors and what is printed"  # fmt: skip


@pytest.mark.parametrize("package", ["sweep", "credentials"])
def test_a_draw_is_the_same_for_the_same_seed_and_leaves_a_source(package: str) -> None:
    drawn = draw_packages([package], 25, seed=3)
    assert drawn == draw_packages([package], 25, seed=3)
    assert {fault for _, fault in draw_packages([package], 10, seed=3)} < {fault for _, fault in drawn}
    assert drawn != draw_packages([package], 25, seed=4)
    assert len({(fault.path, fault.number) for _, fault in drawn}) == 25
    for _, fault in drawn:
        source = (ROOT / fault.path).read_text()
        faulty = fault.apply(source)
        assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(source)), fault
        assert find_again(fault.name) == fault


def test_a_fault_is_found_again_when_lines_have_moved() -> None:
    moved = SOURCE.replace("LIMIT: int", "# a comment\nOTHER = 1\n\nLIMIT: int").replace(
        "    total = 0\n", "    total = 0\n\n"
    )
    before, after = ({fault.name: fault for fault in find_faults("x.py", source)} for source in (SOURCE, moved))
    assert set(before) < set(after)
    assert all(after[name].number > fault.number for name, fault in before.items())
    assert len(before) == len(find_faults("x.py", SOURCE)), "a name is of one fault alone"


def test_equal_lines_are_told_apart_by_their_order() -> None:
    twice = "def f(a, b):\n    if a < b:\n        return 1\n    if a < b:\n        return 2\n"
    names = [fault.name for fault in find_faults("x.py", twice) if fault.operator == "< to <="]
    assert names == [("x.py", "if a < b:", "< to <=", 0), ("x.py", "if a < b:", "< to <=", 1)]


def test_rooms_share_the_draws_by_their_lines() -> None:
    assert share_out({"a": 700, "b": 200, "c": 100}, 10) == {"a": 7, "b": 2, "c": 1}
    assert share_out({"a": 650, "b": 250, "c": 100}, 10) == {"a": 7, "b": 2, "c": 1}
    assert share_out({"a": 10**6, "b": 1}, 10)["b"] == 1
    assert draw_faults({"x.py": SOURCE}, 100, "s") == draw_faults({"x.py": SOURCE}, 1000, "s")


def test_the_mirrored_file_comes_first_and_then_the_room() -> None:
    mirrored, others = find_tests("pipelines/data/feed/order.py", ROOT)
    assert mirrored == ["tests/pipelines/data/feed/test_order.py"]
    assert "tests/pipelines/data/feed/test_plan.py" in others
    assert mirrored[0] not in others
    no_file, elsewhere = find_tests("pipelines/config/parameter_groups.py", ROOT)
    assert not no_file
    assert "tests/pipelines/train/test_parameter_groups.py" in elsewhere, "nothing in its own package names it"
    assert find_tests("pipelines/system/credentials.py", ROOT) == (["tests/pipelines/system/test_credentials.py"], [])


def test_each_equivalent_fault_is_still_there_and_has_a_reason() -> None:
    equivalent = read_equivalent()
    assert equivalent
    for name, reason in equivalent.items():
        assert find_again(name), name
        assert len(reason.split()) > 5


def test_the_table_counts_what_is_not_equivalent() -> None:
    def row(package: str, line: str, outcome: str) -> dict[str, object]:
        return {"package": package, "name": [f"pipelines/{package}/x.py", line, "< to <=", 0], "outcome": outcome}

    rows = [
        row("feed", "a", "mirrored file"),
        row("feed", "b", "package"),
        row("feed", "c", "survived"),
        row("feed", "d", "survived"),
        row("train", "e", "mirrored file"),
    ]
    table = make_table(rows, {("pipelines/feed/x.py", "d", "< to <=", 0): "a bound that nothing reaches"})
    assert "| feed | 4 | 1 | 1 | 1 | 1 | 67 % |" in table
    assert "| all | 5 | 2 | 1 | 1 | 1 | 75 % |" in table
    assert table.endswith("Survivors:\n\n- feed/x.py, < to <=: `c`")


CHECKED = "def half(value):\n    return value // 2\n\n\ndef is_small(value):\n    return value < 3\n"
CHECKS = {
    "test_small.py": "from pipelines.data.feed.small import half\n\n\ndef test_half():\n    assert half(5) == 2\n",
    "test_large.py": (
        "from pipelines.data.feed.small import is_small\n\n\ndef test_small():\n    assert is_small(2) is True\n"
    ),
    "test_broken.py": "def test_fails_without_a_fault():\n    assert False\n",
}


@pytest.mark.long
def test_a_fault_is_tried_with_the_mirrored_file_and_then_with_the_package(tmp_path: Path) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy"
    for name, text in {
        "pipelines/__init__.py": "",  # without it, the package of an editable install would be found first
        "pipelines/data/feed/small.py": CHECKED,
        **{f"tests/pipelines/data/feed/{name}": CHECKS[name] for name in CHECKS},
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    outcomes = {}
    with PytestServer() as server:
        tried = Copy(copy, server, tree)
        for fault in find_faults("pipelines/data/feed/small.py", CHECKED):
            if (fault.operator, fault.number) in (("// to /", 2), ("returns None", 6), ("< to <=", 6)):
                outcomes[fault.operator, fault.number] = try_fault(tried, fault)
                assert (copy / fault.path).read_text() == CHECKED
    package = "tests/pipelines/data/feed"
    assert outcomes == {
        ("// to /", 2): ("mirrored file", f"{package}/test_small.py::test_half"),
        ("returns None", 6): ("package", f"{package}/test_large.py::test_small"),
        ("< to <=", 6): ("survived", ""),
    }


def test_faults_by_hand_are_in_the_source_and_leave_one() -> None:
    """Each is another one by its name, by which `--again` finds it."""
    found = read_by_hand(list(PACKAGES))
    assert len({fault.name for _, fault in found}) == len(found)
    for package, fault in some(found):
        source = (ROOT / fault.path).read_text()
        assert source.splitlines()[fault.number - 1].strip() == fault.line
        changed = fault.apply(source)
        assert changed != source
        ast.parse(changed)
        assert fault.path.startswith(PACKAGES[package])
        assert find_again(fault.name) == fault
    assert {package for package, _ in read_by_hand(["feed"])} == {"feed"}
