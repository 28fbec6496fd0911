"""A sweep's page: complete, self-contained, with the figures of the results, and sensible with few or none."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import ModelConfig, ScalingConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.sweep.answer import Answer, build_answer
from raystride.pipelines.sweep.report_page import render_page, write_report
from raystride.pipelines.sweep.result import Result, Status
from raystride.pipelines.sweep.scaling_model.described import ClusterDescription
from raystride.pipelines.sweep.scaling_model.model import NotPredicted, Prediction
from raystride.pipelines.sweep.views import (
    NUM_GROUPS,
    build_families,
    build_grid,
    build_tradeoffs,
    model_speeds,
    pareto_indices,
    scaling_overhead,
)
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.report.test_page import Reader

SHARES = {"data": 0.05, "forward": 0.2, "backward": 0.4, "update": 0.1, "validation": 0.0, "checkpoint": 0.0}
TOKENS = 4 * 4 * 64
CLUSTER = """
device: cpu
gpus_per_node: 4
intra: {gb_per_s: 10, latency_us: 10}
inter: {gb_per_s: 5, latency_us: 30}
price_per_gpu_hour: 0.5
"""


def sweep(**settings: Any) -> SweepJobConfig:
    space = {"scaling.workers": [1, 2, 4], "train.precision": ["fp32", "bf16"]}
    return SweepJobConfig(
        run="s",
        tokenizer=TokenizerConfig(kind="bytes"),
        model=ModelConfig(layers=2, heads=2, hidden_size=64, context=64),
        train=TrainConfig(slots=4, slot_size=4),
        scaling=ScalingConfig(workers=1),
        sweep=SweepConfig(**{"space": space} | settings),
    )


def trial(speed: float, workers: int = 1, precision: str = "fp32", windows: int = 4, **settings: Any) -> Result:
    """Returns a measured trial: its windows differ by a thousandth, its workers wait longer the more there are."""
    every = {"scaling.workers": workers, "train.precision": precision}
    every |= {name.replace("__", "."): value for name, value in settings.items()}
    label = ", ".join(f"{name.split('.')[1]} {value}" for name, value in every.items())
    speeds = tuple(speed * (1 + 0.001 * number) for number in range(windows))
    reduce = 0.2 * (1 - 1 / workers)
    return Result(
        key=label,
        run=f"s-{label}",
        settings=every,
        label=label,
        round=0,
        status="measured",
        workers=workers,
        device="cpu",
        threads=1,
        places_per_node=4,
        tokens_per_step=TOKENS,
        speeds=speeds,
        step_seconds=tuple(TOKENS / speed for speed in speeds),
        shares=SHARES | {"reduce": reduce, "rest": 0.25 - reduce},
        figures={"joules_per_token": 0.002 / workers, "peak_memory_bytes": 2**30, "mfu": None},
        seconds=12.5,
        overhead_s=7.25,
    )


def failed_trial(status: Status, cause: str, workers: int, precision: str = "fp32") -> Result:
    """Returns a trial without figures."""
    return replace(
        trial(1, workers, precision), status=status, cause=cause, speeds=(), step_seconds=(), shares={}, figures={}
    )


EVERY = [trial(1e4 * n**0.8 * faster, n, name) for n in (1, 2, 4) for name, faster in (("fp32", 1), ("bf16", 1.3))]
FAILED = [
    failed_trial("out_of_memory", "rank 1: OutOfMemoryError: <script>alert(1)</script>", 4, "fp16"),
    failed_trial("refused", "workers 16, slots 4", 16),
    failed_trial("refused", "workers 32, slots 4", 32),
]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """With a scaling model, for a described cluster."""
    cluster = tmp_path_factory.mktemp("described") / "cluster.yaml"
    cluster.write_text(CLUSTER)
    return build_answer(sweep(), EVERY + FAILED, ClusterDescription.load(cluster))


class Cells(Reader):
    """The rows of tables, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attributes)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def read(page: str) -> Cells:
    reader = Cells()
    reader.feed(page)
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def page(described: Answer) -> str:
    """Of that answer."""
    return render_page(described)


def test_it_is_whole_and_needs_nothing_from_elsewhere(page: str) -> None:
    found = read(page)
    assert found.counts["svg"] == 6, "speed-up, two fronts, parts of a step, two settings, errors"
    assert "script" not in found.counts
    pages = [address for address in found.addresses if not address.startswith(("#", "data:"))]
    assert len(pages) == len(EVERY) + 1, "those that were refused never had a page"
    assert "../s-workers%204%2C%20precision%20bf16/report.html" in pages
    assert not re.search(
        r"@import|url\((?!#)|https?://(?!www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)", page
    )


def test_every_trial_is_in_the_table_with_its_figures(page: str) -> None:
    found = read(page)
    rows = {row[0]: row for row in found.rows if len(row) == 10}  # there is no loss, and no run in MLflow
    for one in EVERY:
        milliseconds = f"{1e3 * sum(one.step_seconds) / 4:.4g}"
        assert rows[one.label][1:5] == [
            "measured",
            f"{one.speed:,.0f} ± {one.spread:.1%}",
            str(one.workers),
            milliseconds,
        ]
        share = f"{one.shares['reduce']:.1%}"
        assert rows[one.label][5:] == ["5.0%", share, f"{0.002 / one.workers:.3g}", "1,024", "12.5"]
    for one in FAILED:
        assert rows[one.label][1:3] == [one.status.replace("_", " "), ""]
        assert [one.label, one.status.replace("_", " "), one.cause] in found.rows
    assert "2 refused, 1 out of memory." in found.text


def test_the_best_comes_first_and_says_what_stops_it(described: Answer, page: str) -> None:
    text = read(page).text
    assert described.text in text
    assert described.best
    assert described.best.label == "workers 4, precision bf16"
    assert "What grew most is communication" in text
    beyond = scaling_overhead(build_families(described)[0])
    assert max(beyond, key=lambda part: beyond[part]) == "reduce"
    alone, four = EVERY[1], EVERY[5]
    ideal = sum(alone.step_seconds) / 4 / 4
    assert sum(beyond.values()) == pytest.approx(1e3 * (sum(four.step_seconds) / 4 - ideal))


def test_predictions_have_intervals_or_reasons(described: Answer, page: str) -> None:
    found = read(page)
    assert described.held_out
    assert str(described.held_out) in found.text
    assert {type(prediction) for prediction in described.predictions} >= {Prediction}
    for prediction in described.predictions:
        if isinstance(prediction, Prediction):
            assert prediction.efficiency.text(".0%") in [cell for row in found.rows for cell in row]
            assert prediction.limit in found.text
        else:
            assert "; ".join(prediction.reasons) in found.text
    band = model_speeds(described, build_families(described)[0])
    assert [workers for workers, _ in band] == [1, 2, 4]
    for (_, speed), one in zip(band, EVERY[1::2], strict=True):
        assert speed.low < speed.middle < speed.high
        assert speed.middle == pytest.approx(one.speed, rel=0.1)
    assert "predicted, 80 %" in found.text


def test_without_a_described_cluster_it_says_so_once(described: Answer) -> None:
    reason = "no cluster"
    predictions = [NotPredicted(workers, (reason,)) for workers in (8, 64)]
    text = read(render_page(replace(described, predictions=predictions))).text
    assert f"8, 64 workers: {reason}." in text
    assert "predicted, 80 %" not in text


@pytest.mark.parametrize(
    ("results", "pictures", "said"),
    [
        ([], 0, ["None has", "No step"]),
        (FAILED[1:2], 0, ["nothing to recommend", "1 refused.", "No trial"]),
        (FAILED, 1, ["2 refused, 1 out of memory."]),
        (
            EVERY[:1],
            1,
            ["no speed-up", "4 measured trials", "None: "],
        ),
        ([trial(100, n, windows=1) for n in (1, 2)], 3, ["two settings", "joules a token"]),
    ],
    ids=["nothing", "refused", "failed", "one", "windows-of-one"],
)
def test_pictures_are_there_only_where_there_is_something_to_see(
    results: list[Result], pictures: int, said: list[str]
) -> None:
    found = read(render_page(build_answer(sweep(), results, None)))
    assert found.counts.get("svg", 0) == pictures
    for text in said:
        assert text in found.text


def test_tradeoffs_use_the_known_costs() -> None:
    """Without a price and energy, the time of all workers."""
    poor = [replace(one, figures={}) for one in EVERY[::2]]
    (only,) = build_tradeoffs(build_answer(sweep(target_tokens=2e6), poor, None))
    assert only.cost == "workers × seconds"
    for one, seconds, cost in only.points:
        assert seconds == pytest.approx(2e6 / one.speed)
        assert cost == pytest.approx(one.workers * 2e6 / one.speed)
    priced = build_tradeoffs(build_answer(sweep(price_per_hour=3.6), EVERY[::2], None))
    assert [tradeoff.cost for tradeoff in priced] == ["price", "joules a token"]
    assert priced[0].points[1][2] == pytest.approx(2 * 3.6 / 3600 * 1e6 / EVERY[2].speed)
    assert [point[0].workers for point in priced[0].front] == [4, 2, 1]


@given(points=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_nothing_on_the_front_is_dominated_and_all_else_is_by_what_is_there(points: list[tuple[int, int]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] <= other[1] and one != other

    chosen = pareto_indices(points)
    assert not any(beats(other, points[index]) for index in chosen for other in points)
    others = set(range(len(points))) - set(chosen)
    assert all(any(beats(points[index], points[other]) for index in chosen) for other in others)


def test_a_grid_has_the_fastest_of_each_cell_and_groups_what_are_many() -> None:
    """Two hundred trials, with labels so long that pictures cut them."""
    long = "s3://a-bucket/with/a/very/long/path/" * 4
    many = [trial(100 + number, 1 + number % 2, f"p{number % 3}", optimizer__eps=number / 1e4) for number in range(1, 200)]
    many = [replace(one, label=f"{one.label}, {long}") for one in many]
    few = [replace(one, settings={k: v for k, v in one.settings.items() if k != "optimizer.eps"}) for one in many]
    found = build_grid(replace(build_answer(sweep(), [], None), merged=[*few, failed_trial("failed", "", 3, "p0")]))
    assert found
    assert (found.rows, found.columns) == (("p1", "p2", "p0"), ("1", "2", "3"))
    assert found.cells[2, 2] == 0
    assert (1, 2) not in found.cells
    assert found.cells[0, 1] == max(one.speed for one in few if (one.workers, one.settings["train.precision"]) == (2, "p1"))
    whole = replace(build_answer(sweep(), [], None), merged=many, results=many, best=many[-1])
    grouped = build_grid(whole)
    assert grouped
    assert (grouped.column_setting, len(grouped.columns)) == ("optimizer.eps", NUM_GROUPS)
    assert grouped.columns[0] == "0.0001 to 0.0025"
    assert read(render_page(whole)).counts["tr"] > 200


def test_it_lies_in_the_sweeps_folder(tmp_path: Path) -> None:
    found = build_answer(sweep(), EVERY[:1], None)
    write_report(Folder.from_uri(str(tmp_path)), found)
    assert (tmp_path / "report.html").read_text() == render_page(found)


def test_one_window_has_no_spread_to_tell_of() -> None:
    assert "It trains 100 tokens a second on 1 worker." in build_answer(sweep(), [trial(100.0, windows=1)], None).text
    assert "It trains 100 ± " in build_answer(sweep(), [trial(100.0, windows=4)], None).text


def test_a_sweep_by_loss_has_the_losses_and_the_lowest_first() -> None:
    rates = [0.1, 0.001, 0.01]
    every = [replace(trial(300.0 - i, optimizer__learning_rate=rate), val_loss=2.0 + rate) for i, rate in enumerate(rates)]
    base = sweep(objective="loss")
    found = build_answer(base, every, None)
    assert found.best == every[1]
    assert found.text.startswith(f"Use {every[1].label}. Its loss after ")
    assert " 2.001 (one seed), the lowest of all trials" in found.text
    assert " 299 " in found.text
    assert f"{every[0].label}, has 2.1." in found.text
    rows = [row for row in read(render_page(found)).rows if len(row) == 11 and "measured" in row]
    assert [row[2] for row in rows] == ["2.001", "2.01", "2.1"]


def test_a_sweep_of_speed_and_loss_shows_the_front() -> None:
    base = sweep(space={"scaling.workers": [1, 2], "optimizer.learning_rate": [0.1, 0.2]}, price_per_hour=1.0)
    losses = {100.0: 2.0, 200.0: 2.5, 300.0: 2.1}
    every = [replace(trial(speed, 1, optimizer__learning_rate=loss), val_loss=loss) for speed, loss in losses.items()]
    found = build_answer(base, every, None)
    assert [tradeoff.cost for tradeoff in build_tradeoffs(found)][:2] == ["loss", "price"]
    assert [point[0] for point in build_tradeoffs(found)[0].front] == [every[2], every[0]]
    assert f": {every[2].label} (300 tokens/s, loss 2.1); {every[0].label} (" in found.text
    assert found.summary["front"] == [every[2].run, every[0].run]
    assert "on the front" in render_page(found)


@pytest.mark.long
def test_a_mesh_is_named_in_the_answer_and_on_the_page() -> None:
    base = sweep(space={"scaling.tensor": [1, 2], "scaling.pipeline": [1, 2]})
    base = replace(base, scaling=replace(base.scaling, workers=4))
    every = []
    for tensor, pipeline, speed in ((1, 1, 1000), (2, 1, 3000), (1, 2, 2000), (2, 2, 1500)):
        settings = {"scaling.tensor": tensor, "scaling.pipeline": pipeline}
        label = f"tensor {tensor}, pipeline {pipeline}"
        every.append(replace(trial(speed, 4), key=label, label=label, settings=settings))
    found = build_answer(base, every, None)
    assert "Use tensor 2, pipeline 1." in found.text
    assert " 4 workers in groups of 2 (tensor 2)." in found.text
    assert found.recommended
    assert "tensor: 2" in found.recommended
    assert [found.observations[one.key].work.group_workers for one in every] == [1, 2, 2, 4]
    assert found.model
    rows = read(render_page(found)).rows
    assert ["mesh", "groups of 2 (tensor 2)"] in rows


def test_a_sweep_by_quality_draws_what_was_asked_for() -> None:
    losses = {0.001: 2.5, 0.01: 2.0, 0.1: 2.2}
    every = [replace(trial(100.0, 1, optimizer__learning_rate=rate), val_loss=loss) for rate, loss in losses.items()]
    base = sweep(objective="loss", space={"optimizer.learning_rate": list(losses)})
    text = render_page(build_answer(base, every, None))
    assert "Trials by loss" in text
    assert "Speed-up" not in text
    assert read(text).counts["svg"] == 1
    accuracies = [
        replace(one, metric=number / 10, metric_name="val_accuracy", direction="max") for number, one in enumerate(every)
    ]
    validation = replace(base.validation, metric="val_accuracy", direction="max")
    by_metric = replace(base, validation=validation, sweep=replace(base.sweep, objective="metric"))
    found = build_answer(by_metric, accuracies, None)
    assert found.best == accuracies[2]
    assert "Its val_accuracy after 90 steps is 0.2 (one seed), the highest of all trials." in found.text
    page = render_page(found)
    assert "Trials by val_accuracy" in page
    assert [row[2] for row in read(page).rows if row[:1] == ["settings"] and len(row) > 2] == ["val_accuracy"]
