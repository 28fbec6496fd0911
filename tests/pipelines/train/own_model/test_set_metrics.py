"""Metrics of the whole validation set are those of the set, on any number of workers; what is no mean is refused as one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from raystride.pipelines.config import Config, FitConfig, SettingError, TrainConfig, ValidationConfig
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.set_metrics import OwnSetMetrics, take_set_figures
from raystride.pipelines.train.own_model.task import OwnModelTask, own_model_task
from raystride.run import Run
from tests.distributed import run_distributed
from tests.pipelines.train.own_model.models import DATA, make_mlp, mean_loss
from tests.pipelines.train.own_model.test_training import DDP, own_job
from tests.pipelines.train.strategies.course import run_course

ROOT = Path(__file__).parents[4]


def test_metrics_of_the_set_are_those_of_all_samples_on_any_number_of_workers(tmp_path: Path) -> None:
    scored = []
    for world in (1, 2, 3):
        job = own_job(tmp_path, "of the set", f"on-{world}", DDP if world > 1 else None, exact=True, steps=3)
        job = replace(job, config=replace(job.config, validation=replace(job.config.validation, samples=0)))
        scored.append(run_course(job, world).scored[-1])
    assert scored[0] == scored[1] == scored[2], "to the bit"
    model = make_mlp()
    model.load_state_dict(Run.open("on-1", str(tmp_path)).load_model("last").state_dict())
    with torch.no_grad():
        out = model(torch.from_numpy(DATA["x"])).numpy()
    labels, classes, errors = DATA["y"][:, 0] > 0, out[:, 0] > 0, out - DATA["y"]
    f1 = f1_score(labels, classes)
    assert 0 < f1 < 1
    wanted = {
        "f1": f1,
        "streamed_f1": f1,
        "updated_f1": f1,
        "auc": roc_auc_score(labels, out[:, 0]),
        "correlation": np.corrcoef(out[:, 0], DATA["y"][:, 0])[0, 1],
        "error": np.square(errors[:, 0]).mean(),
        "all_count": len(out),
        "all_median": np.sort(np.abs(errors).ravel())[(errors.size - 1) // 2],
        "small": 3e-9,
        "loss": np.square(errors).mean(),
    }
    assert scored[0] == pytest.approx({f"val_{name}": float(value) for name, value in wanted.items()}, rel=2e-5)


def _own_task(metrics: Any, loss: Any = mean_loss, **validation: Any) -> OwnModelTask:
    config = Config(train=TrainConfig(steps=2), validation=ValidationConfig(**validation), fit=FitConfig(rehearse="off"))
    return own_model_task(OwnModel(make_mlp, DATA, loss, metrics=metrics), __name__)(config)


@pytest.mark.parametrize("name", ["f1", "macro_F1", "roc_auc", "mAP", "recall-at-5", "r2"])
def test_a_number_named_as_what_is_no_mean_is_refused_with_the_remedy(name: str) -> None:
    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        return {name: 0.5}

    remedy = r"must not return a number for .*return \(function, labels, predictions\).*name it in validation\.means"
    with pytest.raises(SettingError, match=remedy):
        _own_task(metrics).describe_dataset()
    assert _own_task(metrics, means=(name,)).metrics == ("val_loss", f"val_{name}")


@pytest.mark.parametrize("name", ["f1_loss_weight", "mapped", "precise", "aucune"])
def test_words_count_as_wholes(name: str) -> None:
    task = _own_task(lambda model, batch: {name: 0.5})
    if name.startswith("f1"):
        with pytest.raises(SettingError, match=r"validation\.means"):
            task.describe_dataset()
    else:
        assert task.metrics[1] == f"val_{name}"


def test_sums_with_counts_are_taken_under_any_name() -> None:
    assert _own_task(lambda model, batch: {"recall": (1.0, 2.0)}).metrics[1] == "val_recall"


def test_more_than_may_be_gathered_is_refused_before_the_start() -> None:
    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        return {"wide": (lambda values: 0.0, torch.zeros(len(batch["x"]), 2**19))}

    with pytest.raises(SettingError, match=r"validation\.gather_mib is 1: it must be at least 6 .*validation\.samples"):
        _own_task(metrics, gather_mib=1, samples=3).describe_dataset()
    assert _own_task(metrics, gather_mib=6, samples=3).metrics == ("val_loss", "val_wide")


def test_more_than_two_samples_foretold_is_refused_on_all_workers_alike() -> None:
    collected = OwnSetMetrics({"sum": ["sum"]}, max_mib=1)
    for batch in range(3):
        collected.collect(batch, {"sum": (lambda values: float(values.sum()), torch.zeros(2**17))})
    with pytest.raises(SettingError, match=r"validation\.gather_mib is 1: it must be at least 2"):
        collected.compute(1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((f1_score, torch.tensor(1.0)), "must give tensors, arrays or lists"),
        ((f1_score, None), "f1 has NoneType"),
        ([1, 2, 3], "must be a number"),
    ],
)
def test_what_cannot_be_gathered_is_refused_before_the_start(value: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        _own_task(lambda model, batch: {"f1": value}).describe_dataset()


def test_a_collection_has_a_figure_for_each_of_its_metrics_and_stays_as_it_was() -> None:
    collection = MetricCollection(
        {"macro": MulticlassF1Score(3), "each": MulticlassF1Score(3, average=None), "table": MulticlassConfusionMatrix(3)}
    )
    generator = torch.Generator().manual_seed(0)
    given, true = (torch.randint(0, 3, (90,), generator=generator) for _ in range(2))
    found = []
    for bounds in ([(0, 90)], [(0, 40), (40, 80), (80, 90)]):
        collected = OwnSetMetrics({"c": []}, max_mib=1)
        for batch, (first, last) in enumerate(bounds):
            collected.collect(batch, {"c": (collection, given[first:last], true[first:last])})
        found.append(collected.compute_one("c"))
    assert found[0] == found[1]
    assert found[0]["c_macro"] == pytest.approx(f1_score(true, given, average="macro"))
    assert [found[0][f"c_each_{label}"] for label in range(3)] == pytest.approx(f1_score(true, given, average=None).tolist())
    assert sum(found[0][f"c_table_{cell}"] for cell in range(9)) == 90
    assert all(metric.update_count == 0 for metric in collection.values())


def test_an_object_that_the_function_updates_itself_is_the_same(tmp_path: Path) -> None:
    single, collection = MulticlassF1Score(3), MetricCollection([MulticlassF1Score(3), MulticlassConfusionMatrix(3)])
    generator = torch.Generator().manual_seed(1)
    given, true = (torch.randint(0, 3, (90,), generator=generator) for _ in range(2))
    names = {"alone": [], "given": [], "several": [], "listed": []}
    collected = OwnSetMetrics(names, max_mib=1)
    for batch, (first, last) in enumerate([(0, 40), (40, 80), (80, 90)]):
        part = given[first:last], true[first:last]
        single.update(*part)
        collection.update(*part)
        figures = {"alone": single, "several": collection}
        collected.collect(batch, take_set_figures(figures) | {"given": (single, *part), "listed": (collection, *part)})
    assert collected.compute_one("alone")["alone"] == collected.compute_one("given")["given"]
    several = {name.removeprefix("several"): value for name, value in collected.compute_one("several").items()}
    assert several == {name.removeprefix("listed"): value for name, value in collected.compute_one("listed").items()}
    assert several["_MulticlassF1Score"] == pytest.approx(f1_score(true, given, average="macro"))
    assert single.update_count == 0


def test_a_function_that_fails_on_two_samples_is_tried_on_all() -> None:
    """One class alone has no ROC."""

    def area(labels: torch.Tensor, scores: torch.Tensor) -> float:
        if len(labels) < 3:
            raise ValueError("too few")
        return 0.75

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        return {"auc": (area, batch["y"], batch["y"])}

    assert _own_task(metrics).metrics == ("val_loss", "val_auc")
    collected = OwnSetMetrics({"auc": ["auc"]}, max_mib=1)
    collected.collect(0, {"auc": (area, torch.zeros(2), torch.zeros(2))})
    with pytest.raises(SettingError, match=r"metrics: auc of all samples raised ValueError: too few in .*, line"):
        collected.compute(1, torch.device("cpu"))
    collected.collect(1, {"auc": (area, torch.zeros(2), torch.zeros(2))})
    assert collected.compute(1, torch.device("cpu")) == {"val_auc": 0.75}


def test_the_metrics_of_the_page_are_recorded_as_it_says() -> None:
    first, second, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-model.md").read_text(), re.DOTALL)
    page: dict[str, Any] = {"__name__": __name__}
    exec(first.partition("run = raystride.fit")[0] + second, page)
    own = OwnModel(page["make_model"], page["data"], page["loss"], metrics=page["metrics"])
    task = own_model_task(own, __name__)(Config(fit=FitConfig(rehearse="off")))
    assert task.metrics == ("val_loss", "val_accuracy", "val_f1", "val_auc", "val_all_top2")


def test_figures_of_all_samples_have_the_names_of_two_and_perhaps_more() -> None:
    """A class that two samples lack has a figure in the whole set; none may go."""
    collected = OwnSetMetrics({"each": ["each_0", "each_1"], "late": ["late"]}, max_mib=1)
    count = torch.bincount
    collected.collect(0, {"each": (count, torch.tensor([0, 1, 2])), "late": (lambda x: {"a": 1.0}, torch.zeros(1))})
    assert collected.compute(1, torch.device("cpu")) == {
        **{f"val_each_{label}": 1.0 for label in range(3)},
        "val_late_a": 1.0,
    }
    fewer = OwnSetMetrics({"each": ["each_0", "each_1"]}, max_mib=1)
    fewer.collect(0, {"each": (count, torch.tensor([0, 0]))})
    with pytest.raises(SettingError, match=r"each has each now, and each_0, each_1 then"):
        fewer.compute(1, torch.device("cpu"))


def _collect_and_compute(rank: int, world: int, function: Any, size: int) -> str:
    collected = OwnSetMetrics({"sum": ["sum"]}, max_mib=1)
    collected.collect(rank, {"sum": (function, torch.full((size,), float(rank + 1)))})
    try:
        return str(collected.compute(world, torch.device("cpu")))
    except SettingError as error:
        return str(error)


def _fail(values: torch.Tensor) -> float:
    raise ValueError("no sum")


def _sum(values: torch.Tensor) -> float:
    return float(values.sum())


@pytest.mark.parametrize(
    ("function", "size", "words"),
    [
        (_sum, 4, "{'val_sum': 12.0}"),
        (_fail, 4, "raised ValueError: no sum"),
        (_sum, 2**18, "gather_mib is 1: it must be at"),
    ],
    ids=["a sum", "an error", "too much together"],
)
def test_all_workers_have_the_same_figures_or_the_same_error(function: Any, size: int, words: str) -> None:
    one, other = run_distributed(_collect_and_compute, 2, function, size)
    assert one == other
    assert words in one
