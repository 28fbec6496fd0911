"""A run's products are measured once for the machine, kept by the run, and PyTorch's own where bits are promised."""

import json
import os
import shutil
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
from tests.busy import busy_cores
from tests.flips import flip

HERE = processor_name()
KEPT = {"processor": HERE, "products": {"32x16": ["onednn", "torch", "onednn"]}, "products_gain": 1.25}


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("RAYSTRIDE_LINEAR", raising=False)


def _model(linear: str = "auto") -> Decoder:
    return Decoder(ModelConfig(layers=2, heads=2, hidden_size=16, context=8, linear=linear), 32)  # type: ignore[arg-type]


def _choose(model: Decoder, train: TrainConfig | None = None, **given: Any) -> tuple[MatmulChoice, list[str]]:
    said: list[str] = []
    given = {"chosen_before": None, "facts": {}, "storage": Folder(f"{os.environ[CACHE_VARIABLE]}-runs")} | given
    choice = choose_matmul_backends(train or TrainConfig(), model, 64, rank=0, world=1, log=said.append, **given)
    return choice, said


def _never_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_of_a_run, "time_products", lambda *_: pytest.fail("measured again"))


def test_a_first_start_measures_and_later_ones_have_its_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = Folder(str(tmp_path / "runs"))
    model = _model()
    choice, said = _choose(model, storage=storage)
    assert model.products.layers[48, 16] == 2
    assert all(model.products.backends(*shape) == (choice.everywhere,) * 3 for shape in model.products.layers)
    assert said == [f"linear products {choice.description}"]
    assert choice.gain is not None
    assert choice.gain >= 1
    assert choice.everywhere != "bf16"  # precision fp32 lets nothing be rounded
    assert MatmulChoice.from_bits(choice.bits) == choice
    _never_measure(monkeypatch)
    assert _choose(_model(), storage=Folder(str(tmp_path / "others")))[0] == choice
    shutil.rmtree(tmp_path / "cache-measured")
    assert _choose(_model(), storage=storage)[0] == choice, "another machine with this processor, or a new container"
    shutil.rmtree(tmp_path / "cache-measured")
    (stored,) = (tmp_path / "runs" / ".machines").iterdir()
    stored.write_bytes(flip(stored.read_bytes(), 80))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        _choose(_model(), storage=storage)


@pytest.mark.parametrize("text", ["{torn", "[]", '{"x": 1}'])
def test_a_table_that_is_torn_is_that_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    first, _ = _choose(_model())
    (table,) = (tmp_path / "cache-measured").glob("*/*.json")
    whole = json.loads(table.read_text())
    table.write_text(text)
    _never_measure(monkeypatch)
    assert _choose(_model())[0] == first
    assert whole.items() <= json.loads(table.read_text()).items()


@pytest.mark.long
def test_starts_under_load_that_remember_nothing_choose_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five starts, beside processes that keep all cores busy and come and go."""
    chosen = set()
    shape = ModelConfig(layers=2, heads=2, hidden_size=128, context=64)
    with busy_cores():
        for number in range(5):
            monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / f"cache-{number}"))
            choice, _ = _choose(Decoder(shape, 500), TrainConfig(precision="bf16"))
            chosen.add(choice.everywhere)
    assert len(chosen) == 1


def test_a_resumed_run_keeps_its_products_and_measures_anew_on_another_processor() -> None:
    model = _model()
    choice, said = _choose(model, chosen_before=KEPT)
    assert (choice.bits, choice.reason) == (KEPT, "")
    assert model.products.backends(32, 16) == ("onednn", "torch", "onednn")
    assert json.loads(json.dumps(choice.bits)) == choice.bits
    choice, said = _choose(_model(), chosen_before=KEPT | {"processor": "Z80"})
    assert choice.ways == {}
    assert choice.gain is not None
    assert said[0] == f"linear products are measured anew: those before were on Z80, and this is {HERE}"


def test_a_run_from_before_they_were_measured_goes_on_by_the_rule_of_then() -> None:
    for bits in ({}, {"device": "cpu"}):
        model = _model()
        choice, said = _choose(model, chosen_before=bits)
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
        choice, said = _choose(_model(linear), chosen_before=KEPT)
        assert (choice.everywhere, choice.ways, said) == (linear, {}, [])


def test_an_opened_run_multiplies_as_its_training_did_where_the_processor_is_the_same() -> None:
    model = _model()
    use_saved_backends(model, ValidCheckpoint(7, Folder("/nowhere"), {"bits": KEPT | {"processor": "Z80"}}))
    assert model.products.backends(32, 16) == ("torch",) * 3
    use_saved_backends(model, ValidCheckpoint(7, Folder("/nowhere"), {"bits": {}}))
    assert model.products.backends(32, 16) == ("torch",) * 3
    use_saved_backends(model, ValidCheckpoint(7, Folder("/nowhere"), {"bits": KEPT}))
    assert model.products.backends(32, 16) == ("onednn", "torch", "onednn")


def test_the_choice_in_words() -> None:
    assert MatmulChoice().description == MatmulChoice(gain=1.0).description == "by PyTorch"
    everywhere = MatmulChoice(everywhere="bf16", gain=1.7)
    assert everywhere.description == "by bf16; together 1.70 times as fast as by PyTorch alone"
    choice = MatmulChoice({(2, 3): ("bf16", "bf16", "torch")}, gain=1.5)
    assert choice.description == "2 by bf16, 1 by PyTorch; together 1.50 times as fast as by PyTorch alone"
    assert MatmulChoice.from_bits(choice.bits) == choice


def test_each_part_of_what_was_measured_alone_is_measured_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, how often each comes, rows and what there is to choose from; unlike settings in one process keep theirs."""
    storage, measured, real = Folder(str(tmp_path / "runs")), list[Any](), products_of_a_run.time_products

    def time_products(*given: Any) -> Any:
        measured.append(given)
        return real(*given)

    monkeypatch.setattr(products_of_a_run, "time_products", time_products)
    cases: list[tuple[Any, ...]] = [
        ({(8, 4): 2}, 8, ("torch", "onednn")),
        ({(4, 8): 2}, 8, ("torch", "onednn")),
        ({(8, 4): 3}, 8, ("torch", "onednn")),
        ({(8, 4): 2, (4, 8): 2}, 8, ("torch", "onednn")),
        ({(8, 4): 2}, 16, ("torch", "onednn")),
        ({(8, 4): 2}, 8, ("torch",)),
    ]
    first = [products_of_a_run._choose_once(*case, storage) for case in cases]
    assert [given[:3] for given in measured] == cases
    assert [products_of_a_run._choose_once(*case, storage) for case in reversed(cases)] == first[::-1]
    assert len(measured) == len(cases)
