"""A training in a notebook: a bar, figures and curves below the cell, and a run that Stop has saved."""

import os
import re
import signal
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raystride
from raystride.pipelines.config import LaunchConfig, TrainConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.launch.console.notebook import HEIGHT, MAX_POINTS, WIDTH, NotebookProgress, draw_curves, in_notebook
from tests.notebooks import Notebook
from tests.tiny import tiny, write_text
from tests.waiting import wait_until


@given(
    st.dictionaries(
        st.sampled_from(["loss", "val_loss"]),
        st.lists(st.tuples(st.integers(1, 10**6), st.floats(-1e3, 1e3, width=32)), max_size=20),
    )
)
def test_curves_stay_inside_their_picture(curves: dict[str, list[tuple[int, float]]]) -> None:
    drawn = draw_curves(curves)
    assert drawn.count("<polyline") == sum(len(points) > 1 for points in curves.values())
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', drawn))):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT


class _Handle:
    """As much of IPython's display handle as is called; keeps the pages."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def update(self, shown: NotebookProgress) -> None:
        self.pages.append(shown._repr_html_())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[NotebookProgress, _Handle]:
    """A display, and what a browser would get of it."""
    handle = _Handle()
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: handle)
    return NotebookProgress(), handle


def test_a_long_training_keeps_its_first_and_last_points(shown: tuple[NotebookProgress, _Handle]) -> None:
    progress, handle = shown
    for step in range(1, 5000):
        progress.update({"step": step, "steps": 6000, "loss": 1.0 / step})
    progress.close()
    points = progress._curves["loss"]
    assert len(points) <= MAX_POINTS
    assert (points[0], points[-1]) == ((1, 1.0), (4999, 1.0 / 4999))
    assert points == sorted(points)
    assert '<progress value="4999" max="6000"' in handle.pages[-1]


def test_lines_and_warnings_are_shown_once_and_as_text(shown: tuple[NotebookProgress, _Handle]) -> None:
    progress, handle = shown
    for _ in range(2):
        progress.update({"phase": "<b>building", "warnings": ["a < b"]})
    progress.log("saved & done")
    ElementTree.fromstring(handle.pages[-1])  # well-formed: nothing is taken for a tag
    assert handle.pages[-1].count("warning: a &lt; b") == 1
    assert "&lt;b&gt;building" in handle.pages[-1]
    assert "saved &amp; done" in handle.pages[-1]
    assert repr(progress).splitlines() == ["<b>building", "warning: a < b", "saved & done"]


def test_a_script_is_no_notebook() -> None:
    assert not in_notebook()


@pytest.mark.long
def test_stop_ends_the_display_and_returns_the_saved_run(tmp_path: Path) -> None:
    train = TrainConfig(steps=100_000, slots=1, log_every=1)
    settings = tiny(write_text(tmp_path), launch=LaunchConfig(mode="inline"), train=train)
    (tmp_path / "settings.yaml").write_text(to_yaml(settings))
    cells = [
        "import raystride\nrun = raystride.train('settings.yaml', run='mine', storage='runs', progress=True)",
        "print(run.summary['status'], run.summary['steps'])",
    ]
    notebook = Notebook.of_cells(cells, tmp_path)
    running = Thread(target=notebook.run)
    running.start()
    wait_until(lambda: any((tmp_path / "runs" / "mine" / "journal").glob("*.jsonl")), "the first entries of the journal")
    os.kill(notebook.kernel_pid, signal.SIGINT)
    running.join()
    saved = raystride.Run.open("mine", tmp_path / "runs")
    steps = saved.summary["steps"]
    assert saved.checkpoints[-1].step == steps < 100_000
    assert notebook.texts(1) == [f"stopped {steps}\n"]
    (display,) = [text for text in notebook.texts(0) if "<progress" in text]
    assert 'max="100000"' in display
    assert "stopping: all workers save" in display
    ElementTree.fromstring(display)
