"""MLflow's pages of our runs: opened, waited for, and read.

with shown(config.storage) as links:
    visit = Visit(browser); open_runs(visit.page, links.runs); rows(visit.page)["run's id"]["metrics.`val/loss`"]
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import FrameLocator, Page

from tests.ports import hold_port


@dataclass(frozen=True)
class Links:
    """What `raystride ui` prints."""

    newest: str
    """The page of the run that was recorded last."""
    runs: str
    """The table of all runs."""
    port: int


@contextmanager
def shown(storage: Path) -> Iterator[Links]:
    """MLflow's UI over a storage, for the block."""
    with hold_port() as port:
        command = [
            sys.executable,
            "-m",
            "raystride.pipelines.observability.record.mlflow.ui",
            "--storage",
            str(storage),
            "--port",
            str(port),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            newest, runs = (process.stdout.readline().split()[-1] for _ in range(2))
            yield Links(newest, runs, port)
        finally:
            process.terminate()
            process.wait()


def mark(storage: Path, run: str) -> dict[str, str]:
    """Which run of MLflow's it is."""
    return dict(json.loads((storage / run / "mlflow.json").read_text()))


def open_runs(page: Page, link: str) -> None:
    """Opens the table of runs. All columns are there only where the page is wide: MLflow draws those that are in sight."""
    page.goto(link)
    page.get_by_role("gridcell").and_(page.locator("[col-id='tags.`raystride.commit`']")).first.wait_for()


def rows(page: Page) -> dict[str, dict[str, str]]:
    """The table's cells by the run's id and the column's name."""
    found: dict[str, dict[str, str]] = {}
    read = "cells => cells.map(c => [c.closest('[row-id]').getAttribute('row-id'), c.getAttribute('col-id'), c.innerText])"
    for run, column, text in page.get_by_role("gridcell").evaluate_all(read):
        found.setdefault(run, {})[column] = text
    return found


def columns(page: Page) -> list[str]:
    """The heads of the table of runs, as they stand from left to right."""
    heads = page.get_by_role("columnheader").evaluate_all("all => all.map(h => [h.getBoundingClientRect().x, h.innerText])")
    return list(dict.fromkeys(text for _, text in sorted(heads) if text.strip()))


def open_run(page: Page, link: str) -> None:
    """Opens a run's page and waits for its figures."""
    page.goto(link)
    page.get_by_role("cell", name="train/loss", exact=True).wait_for()


def values(page: Page) -> dict[str, str]:
    """The metrics and parameters of a run's page."""
    return {
        name: text
        for name, text, *_ in page.get_by_role("row").evaluate_all(
            "rows => rows.map(r => [...r.querySelectorAll('[role=cell]')].map(c => c.innerText).concat('', ''))"
        )
    }


def open_tab(page: Page, name: str) -> None:
    """Turns to another part of a run's page."""
    page.get_by_role("tab", name=name).click()


def open_report(page: Page) -> FrameLocator:
    """The report among the artifacts of a run's page, in its frame."""
    open_tab(page, "Artifacts")
    page.get_by_text("report.html", exact=True).first.click()
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", level=1).wait_for()
    return frame


def open_comparison(page: Page, link: str) -> None:
    """Opens the comparison of runs, with the settings in which they differ alone."""
    page.goto(link)
    page.get_by_role("switch", name="Parameters - Show diff only").click()


def draw(page: Page, parameter: str, metric: str) -> None:
    """Has the comparison draw this parameter and metric, instead of the first ones by the alphabet."""
    page.get_by_test_id("clear-button").click()
    for number, name in enumerate((parameter, metric)):
        page.get_by_role("combobox").nth(number).click()
        page.keyboard.type(name)
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
    page.locator(".pcp-plot .axis-title", has_text=metric).wait_for()


def open_curves(page: Page, *names: str) -> None:
    """The curves of a run's metrics of these names alone."""
    open_tab(page, "Model metrics")
    page.get_by_placeholder("Search metric charts").fill("|".join(f"^{name}$" for name in names))
    page.locator(".js-plotly-plot .scatterlayer .js-line").nth(len(names) - 1).wait_for(state="attached")
