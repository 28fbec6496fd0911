"""A sweep over adapters' settings trains all its trials concurrently, over one base, and answers as any other."""

import math
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import CheckpointConfig, Config, LaunchConfig, LoraConfig, ValidationConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.launch.cluster.resources import Resources
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.sweep.result import Result, load_results
from raystride.pipelines.sweep.shared import measure_shared
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.sweep.sweep_job import list_candidates, resolve_storage, run_trials
from raystride.pipelines.sweep.trial import SweepPlan
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import SHAPES, write_base
from tests.errors import refused
from tests.tiny import tiny, write_text

SPACE = {"optimizer.learning_rate": [1e-3, 1e-2], "lora.rank": [2, 4]}


def _sweep(folder: Path, space: dict[str, Any] = SPACE, **settings: Any) -> SweepJobConfig:
    base = write_base(folder / "base", SHAPES["llama"])
    config = tiny(
        write_text(folder),
        model=replace(SHAPES["llama"], init_from=str(base)),
        lora=LoraConfig(rank=4),
        run="s",
        storage=str(folder / "runs"),
        validation=ValidationConfig(every=0, samples=16),
        checkpoint=CheckpointConfig(every=0),
    )
    rules: dict[str, Any] = {"share_base": True, "objective": "loss", "warmup_steps": 1, "window_steps": 1, "windows": 3}
    sections = {item.name: getattr(config, item.name) for item in fields(Config)}
    return SweepJobConfig(**sections, sweep=SweepConfig(space=space, **rules | {"seeds": 1} | settings))


@pytest.mark.long
def test_all_trials_have_the_losses_of_trainings_of_their_own(tmp_path: Path) -> None:
    base, storage = resolve_storage(Parsed(_sweep(tmp_path), "s"))
    answered = run_trials(base, storage, SilentScreen())
    assert answered.best
    assert answered.best.settings["optimizer.learning_rate"] == 1e-2
    found = load_results(storage / "s")
    assert len(found) == 4
    for candidate in list_candidates(base)[::3]:
        assert candidate.config
        own = train(replace(candidate.config, run=f"own-{candidate.key}"), storage, SilentScreen())
        loss = own["val_loss"]
        assert isinstance(loss, float)
        here = found[candidate.key].val_loss
        assert here is not None
        assert abs(here - loss) < 1e-5
    # What is known is not trained again.
    (storage / "s").put("recommended.yaml", "")
    assert run_trials(base, storage, SilentScreen()).best == answered.best


@pytest.mark.parametrize(
    ("settings", "setting", "value", "names"),
    [
        ({"search": "optuna"}, "share_base", True, ("sweep.search optuna",)),
        ({"shard": "0/2"}, "share_base", True, ("with sweep.shard,",)),
        ({"objective": "throughput"}, "share_base", True, ("`throughput`", "`loss`")),
        ({"early_stopping": "asha"}, "early_stopping", "asha", ("sweep.share_base",)),
        ({"timeout_s": 60.0}, "timeout_s", 60.0, ("sweep.share_base",)),
        ({"space": {"model.init_from": ["a", "b"]}}, "share_base", True, ("model.init_from",)),
        ({"space": {"train.precision": ["fp32", "bf16"]}}, "share_base", True, ("train.precision",)),
    ],
)
def test_settings_impossible_with_a_shared_base_are_refused(
    settings: dict[str, Any], setting: str, value: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    with refused(f"sweep.{setting}", value, names=names):
        _sweep(tmp_path, **settings)


def test_more_trials_are_not_stopped_early_either(tmp_path: Path) -> None:
    assert _sweep(tmp_path, {"seed": list(range(9))}).sweep.early_stopping == "none"


def test_a_sweep_without_adapters_has_no_base_to_share(tmp_path: Path) -> None:
    with refused("sweep.share_base", True, names=["lora.rank"]):
        replace(_sweep(tmp_path, {"seed": [1, 2]}), lora=LoraConfig())


@pytest.mark.long
def test_concurrent_trials_take_the_common_time(tmp_path: Path) -> None:
    base = replace(_sweep(tmp_path, {"lora.rank": [2, 4]}), launch=LaunchConfig(mode="inline"))
    candidates = list_candidates(base)
    refused_one = Candidate(base, {"lora.rank": 2, "train.slots": 0})
    plan = SweepPlan(base, Folder(base.storage), 0.0, Resources.of_this_machine(gpus=False))
    done: list[Result] = []
    began = time.monotonic()
    measure_shared(plan, [refused_one, *candidates], [], 3, done.append)
    took = time.monotonic() - began
    assert [result.status for result in done] == ["refused", "measured", "measured"]
    assert [result.key for result in done] == [refused_one.key, *(candidate.key for candidate in candidates)]
    for result in done[1:]:
        assert 0 < result.seconds <= took
        assert result.seconds > result.overhead_s > 0
        assert result.val_loss is not None
    assert load_results(plan.folder).keys() == {result.key for result in done}
    done.clear()
    measure_shared(plan, [refused_one], [], 1, done.append)
    assert [result.status for result in done] == ["refused"]


@pytest.mark.long
def test_any_metric_of_the_validation_decides(tmp_path: Path) -> None:
    base = replace(
        _sweep(tmp_path, {"optimizer.learning_rate": [1e-3, 1e-2]}, objective="metric"),
        validation=ValidationConfig(every=0, samples=16, metric="val_perplexity"),
    )
    base, storage = resolve_storage(Parsed(base, "s"))
    answered = run_trials(base, storage, SilentScreen())
    assert answered.best
    assert answered.best.settings == {"optimizer.learning_rate": 1e-2}
    for result in load_results(storage / "s").values():
        assert result.val_loss is not None
        assert (result.metric_name, result.metric) == ("val_perplexity", pytest.approx(math.exp(result.val_loss)))
    assert "Its val_perplexity after 4 steps" in answered.text
