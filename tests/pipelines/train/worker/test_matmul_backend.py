"""A run's products are measured once for the machine, kept by the run, and PyTorch's own where bits are promised."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raystride.model.linear import legacy_backend
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig, TrainConfig
from raystride.pipelines.system.limits import processor_name
from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import BEFORE_PRODUCTS
from raystride.pipelines.train.checkpoint.manager import ValidCheckpoint
from raystride.pipelines.train.worker import matmul_backend as products_of_a_run
from raystride.pipelines.train.worker.matmul_backend import MatmulChoice, choose_matmul_backends, use_saved_backends

HERE = processor_name()
KEPT = {"processor": HERE, "products": {"32x16": ["onednn", "torch", "onednn"]}, "products_gain": 1.25}


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("RAYSTRIDE_LINEAR", raising=False)


def _model(linear: str = "auto") -> Decoder:
    return Decoder(ModelConfig(layers=2, heads=2, hidden_size=16, context=8, linear=linear), 32)  # type: ignore[arg-type]


def _checkpoint_with(bits: Mapping[str, Any] | None) -> ValidCheckpoint:
    return ValidCheckpoint(7, Folder("/nowhere"), {"bits": bits} if bits is not None else {})


def _choose(model: Decoder, train: TrainConfig | None = None, **given: Any) -> tuple[MatmulChoice, list[str]]:
    said: list[str] = []
    given = {"found": None, "facts": {}} | given
    choice = choose_matmul_backends(train or TrainConfig(), model, 64, rank=0, world=1, log=said.append, **given)
    return choice, said


def test_a_first_start_measures_every_shape_and_the_second_reads_the_machines_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _model()
    choice, said = _choose(model)
    assert set(choice.ways) == set(model.products.layers) == {(48, 16), (16, 16), (64, 16), (16, 64), (32, 16)}
    assert model.products.layers[48, 16] == 2
    assert all(model.products.backends(*shape) == ways for shape, ways in choice.ways.items())
    assert said == [f"linear products {choice.description}"]
    assert choice.gain is not None
    assert choice.gain >= 1
    # Precision fp32 lets nothing be rounded.
    assert not any("bf16" in ways for ways in choice.ways.values())
    monkeypatch.setattr(products_of_a_run, "time_products", lambda *_: pytest.fail("measured again"))
    assert _choose(_model())[0] == choice
    (table,) = (tmp_path / "cache-measured").glob("*/*.json")
    table.write_text("{torn")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        _choose(_model())


def test_a_resumed_run_keeps_its_products_and_measures_anew_on_another_processor() -> None:
    model = _model()
    choice, said = _choose(model, found=_checkpoint_with(KEPT))
    assert (choice.bits, choice.reason) == (KEPT, "")
    assert model.products.backends(32, 16) == ("onednn", "torch", "onednn")
    assert json.loads(json.dumps(choice.bits)) == choice.bits
    choice, said = _choose(_model(), found=_checkpoint_with(KEPT | {"processor": "Z80"}))
    assert set(choice.ways) == set(model.products.layers)
    assert said[0] == f"linear products are measured anew: the run was on Z80 before, and is on {HERE}"


def test_a_run_from_before_they_were_measured_goes_on_by_the_rule_of_then() -> None:
    for bits in (None, {"device": "cpu"}):
        model = _model()
        choice, said = _choose(model, found=_checkpoint_with(bits))
        assert (choice.ways, choice.everywhere, said) == ({}, legacy_backend(), [])
        assert model.products.backends(32, 16) == (legacy_backend(),) * 3


@pytest.mark.parametrize(("products", "way"), [("torch", "torch"), ("onednn", "onednn"), (BEFORE_PRODUCTS, None)])
def test_an_exact_run_multiplies_as_the_driver_says(products: str, way: str | None) -> None:
    model = _model()
    choice, _ = _choose(model, TrainConfig(exact=True), facts={"bits": {"products": products}})
    assert (choice.ways, choice.everywhere) == ({}, way or legacy_backend())
    assert model.products.backends(32, 16) == (way or legacy_backend(),) * 3


def test_what_is_named_is_not_measured() -> None:
    for linear in ("torch", "onednn"):
        choice, said = _choose(_model(linear), found=_checkpoint_with(KEPT))
        assert (choice.everywhere, choice.ways, said) == (linear, {}, [])


def test_an_opened_run_multiplies_as_its_training_did_where_the_processor_is_the_same() -> None:
    model = _model()
    use_saved_backends(model, _checkpoint_with(KEPT | {"processor": "Z80"}))
    assert model.products.backends(32, 16) == ("torch",) * 3
    use_saved_backends(model, _checkpoint_with({}))
    assert model.products.backends(32, 16) == ("torch",) * 3
    use_saved_backends(model, _checkpoint_with(KEPT))
    assert model.products.backends(32, 16) == ("onednn", "torch", "onednn")


def test_the_choice_in_words() -> None:
    assert MatmulChoice().description == "by PyTorch"
    choice = MatmulChoice({(2, 3): ("bf16", "bf16", "torch")}, gain=1.5)
    assert choice.description == "2 by bf16, 1 by PyTorch; together 1.50 times as fast as by PyTorch alone"
    assert MatmulChoice.from_bits(choice.bits) == choice
