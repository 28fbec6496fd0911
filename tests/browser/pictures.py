"""The documentation's pictures, docs/pictures/*.png: trains two runs, then photographs the pages that people see of them.

    python -m tests.browser.pictures                              # some five minutes on two cores
    python -m tests.browser.pictures --storage runs               # of a storage's runs, the first of which gets a page
    python -m tests.browser.pictures --storage runs --sweep runs/my-sweep      # of a sweep's report.html as well

Exit codes: 0 done, 1 a training failed, 2 there is no Chromium, or no run in the storage.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page

from raystride.pipelines.observability.record.mlflow.links import comparison_link, run_link
from tests.browser import pages
from tests.browser.chromium import PROGRAM, Visit, chromium

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
CURVES = ("train/loss", "val/loss", "tokens_per_second", "step_seconds_p50", "train/learning_rate", "train/gradient_norm")
RATES = ("2.0e-3", "5.0e-4")
SETTINGS = "--train.steps 400 --validation.every 100 --checkpoint.every 200 --scaling.workers 2"
TALLEST = 1950
"""Pixels of a report that are shown at most: of a run's, down to where a step's time goes."""
TIDY = ".assistant-fab-label, :has(> .assistant-fab-label) {display: none !important}"
"""Hides the button of MLflow's chat."""


def main(arguments: list[str] | None = None) -> int:
    """Makes the pictures; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.pictures", description="Makes the pictures of docs/.")
    parser.add_argument("--storage", type=Path, help="folder of runs (default: two are trained)")
    parser.add_argument("--sweep", type=Path, help="folder of a sweep, whose report.html is photographed, too")
    given = parser.parse_args(arguments)
    if PROGRAM is None:
        print("there is no Chromium: apt install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        storage = given.storage or Path(scratch) / "runs"
        if given.storage is None and not train(storage):
            return 1
        runs = sorted(path.parent.name for path in storage.glob("*/mlflow.json"))
        if len(runs) < 2:
            print(f"--storage is {storage}: MLflow has {len(runs)} of its runs, two are needed", file=sys.stderr)
            return 2
        PICTURES.mkdir(exist_ok=True)
        with pages.shown(storage) as links, chromium() as browser:
            of_mlflow(browser, storage, runs, links)
            of_report(browser, storage / runs[0] / "report.html", "report")
            if given.sweep:
                of_report(browser, given.sweep / "report.html", "sweep")
    return 0


def train(storage: Path) -> bool:
    """Trains the embedded default for some hundred steps at two learning rates; whether it worked."""
    command = [sys.executable, "ray_jobs/train.py", "--config", "configs/lm_python.yaml", "--storage", str(storage)]
    flags = ([f"--optimizer.learning_rate={rate}", f"--run=python-{rate}"] for rate in RATES)
    return all(subprocess.run([*command, *SETTINGS.split(), *each], cwd=ROOT).returncode == 0 for each in flags)


def of_mlflow(browser: Browser, storage: Path, runs: list[str], links: pages.Links) -> None:
    """The table of runs, the curves of the first one, and the comparison of all."""
    marks = [pages.mark(storage, run) for run in runs]
    visit = Visit(browser, width=2000, height=330 + 32 * len(runs))
    pages.open_runs(visit.page, links.runs)
    visit.page.get_by_role("button", name="Hide banner").click()
    visit.page.get_by_role("button", name="Toggle sidebar").click()
    save(visit.page, "runs")

    visit = Visit(browser, width=1300, height=1040)
    pages.open_run(visit.page, str(run_link(marks[0], links.port)))
    pages.open_curves(visit.page, *CURVES)
    save(visit.page, "run")

    visit = Visit(browser, width=1300, height=1195)
    pages.open_comparison(visit.page, str(comparison_link(marks, links.port)))
    pages.draw(visit.page, "optimizer.learning_rate", "val/loss")
    save(visit.page, "comparison")


def of_report(browser: Browser, path: Path, name: str) -> None:
    """The upper part of a report, up to a heading."""
    visit = Visit(browser, width=1000, height=TALLEST)
    visit.page.goto(path.resolve().as_uri())
    tops = visit.page.locator("h2").evaluate_all("all => all.map(h => h.getBoundingClientRect().top)")
    visit.page.set_viewport_size({"width": 1000, "height": int(max(top for top in tops if top < TALLEST))})
    save(visit.page, name)


def save(page: Page, name: str) -> None:
    """Writes what is in sight of the page, and says so."""
    page.add_style_tag(content=TIDY)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path, animations="disabled")
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    sys.exit(main())
