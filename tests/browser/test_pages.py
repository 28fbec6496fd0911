"""Two runs in a real browser: MLflow's table, page and comparison of them, and our report, show the figures we wrote."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from raystride.command import run as run_command
from raystride.pipelines.config import Config, LaunchConfig, OptimizerConfig, RecordConfig, TrainConfig
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.observability.record.mlflow.links import VIEW_METRICS, VIEW_PARAMETERS, VIEW_TAGS, run_link
from raystride.pipelines.observability.record.mlflow.names import section_name
from raystride.pipelines.sweep.answer import build_answer
from raystride.pipelines.sweep.report_page import render_page
from tests.browser import pages
from tests.browser.chromium import PROGRAM, Visit, chromium
from tests.pipelines.sweep.test_report_page import EVERY, FAILED, sweep
from tests.ray_jobs.jobs import finish_job, run_folder, start_job, summary
from tests.tiny import tiny, write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine; .ci/tools brings Debian's"),
]
RATES = {"calm": 0.002, "hasty": 0.01}
"""Learning rates, by run."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of two runs, which have ended, but for the learning rate."""
    path = tmp_path_factory.mktemp("browser")
    settings = tiny(
        write_text(path),
        storage=str(path / "runs"),
        launch=LaunchConfig(mode="inline"),
        record=RecordConfig(system_every_s=0.01),  # several readings: MLflow draws one alone as a bar
        train=TrainConfig(steps=20, slots=4, slot_size=2, log_every=2),
    )
    changed = {run: replace(settings, optimizer=OptimizerConfig(learning_rate=rate)) for run, rate in RATES.items()}
    for run in RATES:
        outcome = finish_job(start_job("train", changed[run], "--run", run))
        assert outcome.code == 0, outcome.err[-4000:]
    return settings


@pytest.fixture(scope="module")
def links(config: Config) -> Iterator[pages.Links]:
    """MLflow's UI over the two runs."""
    with pages.shown(Path(config.storage)) as links:
        yield links


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A page wide enough for the table of runs."""
    visit = Visit(browser, width=2000)
    yield visit
    visit.close()


def measured(config: Config, run: str, kind: str = "metrics") -> dict[str, Any]:
    """The newest figures of a run's journal, by name."""
    entries = [entry for entry in read_entries(run_folder(config, run)) if entry["kind"] == kind]
    return {name: value for entry in entries for name, value in entry["values"].items()}


def test_the_table_has_our_columns_in_our_order_and_the_figures_of_both_runs(
    config: Config, links: pages.Links, visit: Visit
) -> None:
    pages.open_runs(visit.page, links.runs)
    all_of = {run: measured(config, run) | measured(config, run, "system") for run in RATES}
    named = {run: {section_name(name): value for name, value in all_of[run].items()} for run in RATES}
    expected = {run: {name: named[run][name] for name in VIEW_METRICS if name in named[run]} for run in RATES}
    shown = pages.rows(visit.page)
    for run, figures in expected.items():
        cells = shown[pages.mark(Path(config.storage), run)["run_id"]]
        assert run in cells["attributes.`Run Name`"]
        assert {name: float(cells[f"metrics.`{name}`"]) for name in figures} == pytest.approx(figures)
        whole = summary(config, run)
        assert float(cells["metrics.`val/loss`"]) == pytest.approx(whole["val_loss"])
        assert float(cells["metrics.`run_tokens_per_second`"]) == pytest.approx(whole["tokens_per_second"])
        assert float(cells["params.`optimizer.learning_rate`"]) == RATES[run]
        assert cells["tags.`raystride.device`"] == "cpu"
    ours = [name for name in pages.columns(visit.page) if name in {*VIEW_METRICS, *VIEW_PARAMETERS, *VIEW_TAGS}]
    assert ours == [name for name in (*VIEW_METRICS, *VIEW_PARAMETERS, *VIEW_TAGS) if name in ours]
    assert {*expected["calm"], *VIEW_PARAMETERS, *VIEW_TAGS} == set(ours)


def test_the_page_of_a_run_has_its_settings_figures_and_description(
    config: Config, links: pages.Links, visit: Visit
) -> None:
    pages.open_run(visit.page, links.newest)
    shown, text = pages.values(visit.page), visit.page.inner_text("main")
    figures, ends = measured(config, "hasty"), summary(config, "hasty")
    assert {name: float(shown[section_name(name)]) for name in figures} == pytest.approx(figures)
    for name in ("train_loss", "val_loss", "seconds_to_first_step"):
        assert float(shown[section_name(name)]) == pytest.approx(ends[name]), name
    assert (shown["optimizer.learning_rate"], shown["train.steps"], shown["model.hidden_size"]) == ("0.01", "20", "16")
    assert f"{config.storage}/hasty" in text
    assert f"raystride runs show hasty --storage {config.storage}" in text
    assert "Evaluation" not in visit.page.inner_text("body")  # MLflow's side for language models' traces


def test_its_curves_begin_with_the_losses(links: pages.Links, visit: Visit) -> None:
    pages.open_run(visit.page, links.newest)
    pages.open_tab(visit.page, "Model metrics")
    heads = visit.page.get_by_test_id("experiment-view-compare-runs-section-header")
    heads.filter(has_text="val").first.wait_for()
    assert [text.split("\n")[0] for text in heads.all_inner_texts()] == ["train", "val", "Model metrics"]


def test_what_the_machine_did_is_drawn(config: Config, links: pages.Links, visit: Visit) -> None:
    pages.open_run(visit.page, links.newest)
    pages.open_tab(visit.page, "System metrics")
    readings = {name for name in measured(config, "hasty", "system") if name.startswith("system/")}
    assert readings
    head = visit.page.get_by_test_id("experiment-view-compare-runs-section-header")
    head.filter(has_text=f"System metrics({len(readings)})").wait_for()
    curve = visit.page.locator(".js-plotly-plot .scatterlayer .js-line").first
    curve.wait_for(state="attached")
    assert curve.get_attribute("d")


def test_mlflow_shows_the_report_among_the_artifacts(config: Config, links: pages.Links, visit: Visit) -> None:
    pages.open_run(visit.page, str(run_link(pages.mark(Path(config.storage), "calm"), links.port)))
    frame = pages.open_report(visit.page)
    assert frame.get_by_role("heading", level=1).inner_text() == "Run calm"
    assert f"{summary(config, 'calm')['val_loss']:.4f}" in frame.get_by_role("table").first.inner_text()
    assert frame.locator("svg").count() > 2


def test_the_comparison_shows_both_runs_and_the_one_setting_in_which_they_differ(
    config: Config, links: pages.Links, visit: Visit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["runs", "compare", *RATES, "--storage", config.storage, "--port", str(links.port)]) == 0
    link = re.search(r"http\S+compare-runs\S+", capsys.readouterr().out)
    assert link is not None
    pages.open_comparison(visit.page, link.group())
    visit.page.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    text = visit.page.inner_text("main")
    assert all(run in text for run in RATES)
    lines = [line.split("\t") for line in text.splitlines()]
    assert ["optimizer.learning_rate", "0.002", "0.01"] in lines
    assert not re.search(r"optimizer\.betas|model\.width", text)


def test_the_report_draws_every_picture_and_asks_for_nothing_from_elsewhere(config: Config, visit: Visit) -> None:
    report = (Path(config.storage) / "hasty" / "report.html").as_uri()
    visit.page.goto(report)
    assert visit.page.get_by_role("heading", level=1).inner_text() == "Run hasty"
    boxes = [picture.bounding_box() for picture in visit.page.locator("svg").all()]
    assert len(boxes) > 2
    assert all(box and box["width"] > 100 and box["height"] > 50 for box in boxes), boxes
    assert visit.requests == [report]
    assert visit.errors == []


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.weekly), 800])
def test_no_table_of_a_page_is_cut_off(config: Config, browser: Browser, tmp_path: Path, width: int) -> None:
    every = [
        replace(
            one, mlflow_run_id="e" * 32, metric=0.5, metric_name="val_macro_f1", label=f"{one.label}, data.source {tmp_path}"
        )
        for one in EVERY
    ]
    base = sweep(objective="metric", space={"scaling.workers": [1, 2, 4], "train.precision": ["fp32", "bf16"]})
    (tmp_path / "sweep.html").write_text(render_page(build_answer(base, every + FAILED, None)))
    visit = Visit(browser, width=width)
    for page in (tmp_path / "sweep.html", Path(config.storage) / "hasty" / "report.html"):
        visit.page.goto(page.as_uri())
        boxes = visit.page.locator("html, .scroll:has(table)")
        sizes = boxes.evaluate_all("all => all.map(box => [box.scrollWidth, box.clientWidth, box.innerText.slice(0, 200)])")
        assert len(sizes) > 3
        assert not [(wanted, there, text) for wanted, there, text in sizes if wanted > there]
    visit.close()
