"""`scaling.mesh auto`: the smallest mesh that the preflight lets pass, or what a sweep has left."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import Config, ModelConfig, ObjectiveConfig, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.launch.cluster.resources import Resources, resolve_allocation
from raystride.pipelines.launch.preflight.checks import GIB, check_settings
from raystride.pipelines.launch.preflight.choose_mesh import choose_mesh, store_mesh
from raystride.pipelines.system.storage.folder import Folder

SHAPE = ModelConfig(layers=24, heads=16, hidden_size=2048, context=2048)
AUTO = ScalingConfig(mesh="auto", device="cuda")


def _config(scaling: ScalingConfig = AUTO, shape: ModelConfig = SHAPE, **train: Any) -> Config:
    return Config(
        model=shape, scaling=scaling, train=TrainConfig(**{"slots": 32, "slot_size": 1, "micro_batch_slots": 1} | train)
    )


def _gpus(gib: float, nodes: int = 1, each: int = 8) -> Resources:
    return Resources(nodes * 64, nodes * each, 2**40, gib * GIB, nodes=nodes, node_cpus=(64,) * nodes)


def _chosen(config: Config, there: Resources, storage: Folder | None = None) -> ScalingConfig:
    return choose_mesh(config, there, storage, lambda _: None)[0].scaling


def _passes(config: Config, there: Resources) -> bool:
    try:
        share = resolve_allocation(config, there)
    except SettingError:
        return False
    return all(check.passed for check in check_settings(config, share, there))


def test_what_fits_takes_no_mesh_and_what_does_not_the_smallest() -> None:
    roomy, shards, halves = (_chosen(_config(), _gpus(gib)) for gib in (80, 16, 10))
    assert (roomy.group, roomy.strategy) == (1, "auto")
    assert (shards.group, shards.strategy) == (1, "fsdp")
    assert (halves.tensor, halves.pipeline, halves.context) == (2, 1, 1)


@pytest.mark.parametrize("gib", [80, 16, 10, 6])
@pytest.mark.parametrize(
    "given", [ScalingConfig(), ScalingConfig(pipeline=2), ScalingConfig(context=2)], ids=["none", "pipeline", "context"]
)
def test_pairs_are_cut_as_windows_are_and_preferences_never(gib: float, given: ScalingConfig) -> None:
    base = _config(replace(given, mesh="auto", device="cuda"))
    windows = _chosen(base, _gpus(gib))
    assert _chosen(replace(base, task="completion"), _gpus(gib)) == windows
    if given.group == 1:
        preference = replace(base, task="preference", objective=ObjectiveConfig(reference_free=True))
        assert _chosen(preference, _gpus(gib)).group == 1
    else:
        assert windows.group > 1


def test_more_workers_than_slots_share_them() -> None:
    scaling = _chosen(_config(replace(AUTO, workers=8), slots=4), _gpus(80))
    assert (scaling.tensor, scaling.group) == (2, 2)


def test_tensor_and_context_stay_inside_a_node() -> None:
    scaling = _chosen(_config(replace(AUTO, strategy="ddp")), _gpus(12, nodes=8, each=2))
    assert scaling.tensor * scaling.context <= 2 < scaling.group


def test_no_device_is_left_idle_where_that_can_be() -> None:
    scaling = _chosen(_config(replace(AUTO, strategy="ddp")), _gpus(8, nodes=8, each=2))
    assert scaling.group == 8  # 6 of 16 would do


def test_what_is_given_stays() -> None:
    given = replace(AUTO, mesh="given")
    assert _chosen(_config(given), _gpus(1)) == given
    assert _chosen(_config(replace(AUTO, pipeline=4)), _gpus(80)).pipeline == 4
    nothing_fits = _config()
    assert choose_mesh(nothing_fits, _gpus(0.5), None, lambda _: None)[0] is nothing_fits


@given(
    gib=st.sampled_from([1, 2, 4, 8, 16, 40]),
    nodes=st.integers(1, 3),
    heads=st.sampled_from([4, 6, 16]),
    layers=st.integers(1, 12),
    workers=st.sampled_from(["auto", 2, 6, 8]),
    task=st.sampled_from(["language_model", "classification"]),
)
def test_nothing_smaller_passes(gib: int, nodes: int, heads: int, layers: int, workers: Any, task: str) -> None:
    shape = ModelConfig(layers=layers, heads=heads, hidden_size=64 * heads, context=1024)
    config, there = replace(_config(replace(AUTO, workers=workers), shape), task=task), _gpus(gib, nodes)
    lines: list[str] = []
    found, allocation = choose_mesh(config, there, None, lines.append)
    assert allocation == resolve_allocation(found, there)
    assert _passes(found, there) == bool(lines)
    if found.scaling.group > 1:
        alone = [replace(config, scaling=replace(config.scaling, strategy=kind)) for kind in ("auto", "fsdp")]
        assert not any(_passes(each, there) for each in alone)


def test_a_sweeps_answer_is_taken_where_it_can_be(tmp_path: Path) -> None:
    storage = Folder.from_uri(str(tmp_path))
    recommended = _config(ScalingConfig(tensor=2, context=2, context_exchange="keys", strategy="fsdp", workers=8))
    store_mesh(storage, recommended, "meshes")
    log: list[str] = []
    scaling = choose_mesh(_config(), _gpus(80), storage, log.append)[0].scaling
    assert (scaling.tensor, scaling.context, scaling.context_exchange, scaling.strategy) == (2, 2, "keys", "fsdp")
    assert "as sweep meshes recommends" in log[0]
    assert _chosen(_config(), _gpus(80, each=2), storage).group == 1  # it wants four
    assert _chosen(_config(slots=16), _gpus(80), storage).group == 1  # another step


def test_masks_of_dropout_do_not_follow_what_is_chosen() -> None:
    assert _config().masks_by_place
    assert not _config(replace(AUTO, mesh="given")).masks_by_place


def test_workers_beyond_slots_are_left_to_the_choice() -> None:
    with pytest.raises(SettingError, match=r"train\.slots"):
        _config(ScalingConfig(workers=8), slots=4)
    assert _config(replace(AUTO, workers=8), slots=4).scaling.workers == 8
