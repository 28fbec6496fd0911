"""Predictions come in order, whatever batch they share; losses are the model's own."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from raystride.model.linear import has_bf16
from raystride.pipelines.config import PredictorConfig, SampleConfig
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks.text_generation import write_text
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import open_run, select_run
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from tests.pipelines.evaluate.conftest import texts
from tests.some import some


def _predictor(
    trained: Folder, run: str, *, graded: bool = False, sample: SampleConfig | None = None, **changes: object
) -> Predictor:
    settings = PredictorConfig(run=run, **changes)  # type: ignore[arg-type]
    return Predictor(open_run(trained, run, "last"), settings, sample, graded=graded)


def test_labels_come_in_order_and_alike_from_any_batch(trained: Folder) -> None:
    questions = [(row["text"],) for row in texts(50)]
    alone = list(_predictor(trained, "labels", batch=1).predict(questions))
    together = list(_predictor(trained, "labels", batch=7).predict(questions))
    assert [row["text"] for row in together] == [text for (text,) in questions]
    for one, other in zip(alone, together, strict=True):
        # Padding takes no part, so only the order of additions differs.
        assert np.allclose(one["probabilities"], other["probabilities"], rtol=0, atol=64 * torch.finfo(torch.float32).eps)


def test_what_a_graded_batch_draws_is_seeded_by_its_number(trained: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, drawn = _predictor(trained, "labels", graded=True, batch=4), list[float]()
    losses = predictor.task.answer_with_losses

    def draw(*arguments: Any) -> Any:
        drawn.append(random.random() + np.random.rand() + float(torch.rand(())))
        return losses(*arguments)

    monkeypatch.setattr(predictor.task, "answer_with_losses", draw)
    rows = [(row["text"], row["label"]) for row in texts(12)]
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        expected = random.Random(seed).random()
        before = torch.get_rng_state()
        assert len(list(predictor.predict(rows))) == 12
        assert torch.equal(torch.get_rng_state(), before)
        assert random.random() == expected
    assert len(set(drawn[:3])) == 3
    assert drawn[:3] == drawn[3:]


def test_bf16_is_near_fp32(trained: Folder) -> None:
    questions = [(row["text"],) for row in texts(9)]
    exact, rounded = (
        np.array([row["probabilities"] for row in _predictor(trained, "labels", precision=precision).predict(questions)])
        for precision in ("fp32", "bf16")
    )
    assert np.abs(exact - rounded).max() < 16 * torch.finfo(torch.bfloat16).eps
    assert np.array_equal(exact, rounded) is not has_bf16()


def test_translations_are_those_of_the_task(trained: Folder) -> None:
    predictor = _predictor(trained, "translates", batch=4)
    questions = [(row["text"],) for row in texts(9)]
    found = [row["translation"] for row in predictor.predict(questions)]
    task = predictor.task
    expected = []
    for question in questions:
        inputs, _ = task.collate([task.encode(question)[0]], None)
        expected += [answer["translation"] for answer in task.answer(predictor.model, inputs)]
    assert found == expected


def test_continuations_are_the_models_text(trained: Folder) -> None:
    sample = SampleConfig(tokens=12, temperature=0.0, stop=("zzz",))
    prompts = [row["text"] for row in texts(5)]
    opened = open_run(trained, "writes", "last")
    found = [
        row["continuation"] for row in _predictor(trained, "writes", sample=sample, batch=2).predict((p,) for p in prompts)
    ]
    for prompt, text in some(zip(prompts, found, strict=True)):
        alone = SampleConfig(tokens=12, temperature=0.0, stop=("zzz",), prompt=prompt)
        assert text == "".join(write_text(opened.decoder, opened.task, alone))


def test_windows_predict_each_token_once(trained: Folder) -> None:
    predictor = _predictor(trained, "writes", graded=True, batch=3)
    text = " ".join(row["text"] for row in texts(12))
    rows = list(predictor.predict_examples(predictor.build_examples(Piece((text,)))))
    assert len(rows) > 3
    assert "".join(row["text"] for row in rows) == text
    assert sum(row["targets"] for row in rows) == len(text) + 1  # the end token
    assert sum(row["bytes"] for row in rows) == len(text.encode())
    encoder = predictor.task.encoders["tokenizer"]
    ids = torch.tensor([[encoder.end_id, *encoder.encode(text).tolist()[:48]]])
    with torch.no_grad():
        loss, _ = predictor.model(ids[:, :-1], ids[:, 1:])
    assert rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("run", ["labels", "translates", "completes", "packs"])
def test_the_losses_of_a_batch_add_up_to_the_models(trained: Folder, run: str) -> None:
    predictor = _predictor(trained, run, graded=True, batch=16)
    key = "label" if run == "labels" else "target"
    documents = [(row["text"], row[key]) for row in texts(16)]
    rows = list(predictor.predict(documents))
    task = predictor.task
    encoded, masks = zip(*(task.encode(document) for document in documents), strict=True)
    inputs, targets = task.collate(encoded, None if masks[0] is None else masks)  # type: ignore[arg-type]
    with torch.no_grad():
        loss, counted = predictor.model(*inputs, targets)
    assert sum(row["targets"] for row in rows) == int(counted)
    assert sum(row["loss"] for row in rows) == pytest.approx(float(loss), rel=1e-5)


def test_an_average_is_the_mean_of_the_checkpoints(trained: Folder) -> None:
    averaged = dict(open_run(trained, "labels", "last", average=2).model.named_parameters())
    both = select_run(trained, "labels", "last", average=2).checkpoints
    assert [found.step for found in both] == [6, 3]
    models = []
    for found in both:
        model = open_run(trained, "labels", "last").model
        Checkpoints(found.folder, attempt="", keep=1).load(found, model)
        models.append(dict(model.named_parameters()))
    for name, value in averaged.items():
        assert torch.allclose(value, (models[0][name] + models[1][name]) / 2, rtol=1e-6, atol=1e-8), name
    assert any(not torch.equal(models[0][name], models[1][name]) for name in averaged)


def test_invalid_inputs_are_refused(trained: Folder) -> None:
    predictor = _predictor(trained, "labels", graded=True)
    with pytest.raises(ValueError, match="'quince'"):
        list(predictor.predict([("ripe quince", "quince")]))
