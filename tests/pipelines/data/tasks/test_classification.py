"""Classification: labels and texts as fed to the model; scores equal those of torchmetrics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from raystride.pipelines.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TokenizerConfig
from raystride.pipelines.data.prepare.fingerprint import compute_fingerprint
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.labels import BINS, accuracy_and_macro_f1
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder, CharacterEncoder
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import ENCODERS, write_encoder
from tests.errors import refused

LETTERS = CharacterEncoder("abcdefgh")
FACTS = {"vocabulary_size": LETTERS.vocabulary_size, "end_id": 0, "labels": ["no", "yes"], "shares": [0.25, 0.75]}


def _task(kind: str = "characters", **changes: object) -> Classification:
    config = Config(
        task="classification",
        model=ModelConfig(layers=1, heads=1, hidden_size=8, context=6),
        tokenizer=TokenizerConfig(kind=kind),  # type: ignore[arg-type]
        **changes,  # type: ignore[arg-type]
    )
    encoder = ByteEncoder() if kind == "bytes" else LETTERS
    task = build_task(config, FACTS | {"vocabulary_size": encoder.vocabulary_size}, {"tokenizer": encoder})
    assert isinstance(task, Classification)
    return task


def test_labels_are_learned_in_order_with_their_shares() -> None:
    task = _task()
    surveys = [task.survey([("x", "10"), ("y", "9")]), task.survey([("z", "b"), ("w", "9")])]
    facts = task.learn(surveys)
    assert facts["labels"] == ["9", "10", "b"]
    assert facts["shares"] == [0.5, 0.25, 0.25]


def test_one_label_is_no_classification() -> None:
    with refused("data.label_column", "label"):
        _task().learn([{"labels": {"a": 5}}])


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_texts_are_cut_to_the_context_and_padded(kind: str) -> None:
    task = _task(kind)
    rows = [task.encode(document)[0] for document in (("abc", "yes"), ("abcdefgh", "no"), ("h",))]
    inputs, targets = task.collate([row.astype(np.uint8) for row in rows], None)
    ids, lengths = task.unpack(inputs)
    assert targets.tolist() == [1, 0, 0]
    assert lengths.tolist() == [3, 6, 1]
    expected = [[*row[1:].tolist(), *[0] * (6 - len(row[1:]))] for row in rows]
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64
    assert task.collate(rows, [np.zeros(len(row), bool) for row in rows])[1].tolist() == [IGNORED] * 3
    assert task.ids == (256 if kind == "bytes" else LETTERS.vocabulary_size)


def test_a_prediction_asks_for_the_text_alone() -> None:
    task = _task()
    assert [column.name for column in task.columns] == ["text", "label"]
    assert [column.name for column in task.asked] == ["text"]


def test_an_unknown_label_is_named() -> None:
    with pytest.raises(ValueError, match=r"'maybe'.* no, yes$"):
        _task().encode(("abc", "maybe"))


def test_balanced_weights_have_a_mean_of_one_over_the_examples() -> None:
    weights = _task(objective=ObjectiveConfig(class_weights="balanced")).class_weights
    assert weights == (2.0, pytest.approx(2 / 3))
    assert 0.25 * weights[0] + 0.75 * weights[1] == pytest.approx(1.0)
    assert _task().class_weights == ()


def test_a_loss_for_images_is_refused() -> None:
    with refused("objective.loss", "mse"):
        _task(objective=ObjectiveConfig(loss="mse"))


def test_measures_sum_and_ignore_masked_targets() -> None:
    task = _task()
    torch.manual_seed(0)
    model = task.build_model().eval()
    rows = [task.encode(document)[0] for document in (("abc", "yes"), ("de", "no"), ("h", "no"))]
    inputs, targets = task.collate(rows, None)
    with torch.no_grad():
        loss, counted, confusion = task.measure(model, inputs, targets)
        whole, number = model(*inputs, targets)
        given = model.logits(*inputs).argmax(-1).tolist()
        _, none, empty = task.measure(model, inputs, torch.full_like(targets, IGNORED))
    assert (loss.item(), int(counted)) == (pytest.approx(whole.item()), int(number))
    expected = np.zeros((2, 2))
    for true, chosen in zip(targets.tolist(), given, strict=True):
        expected[true, chosen] += 1
    assert confusion.view(2, 2).tolist() == expected.tolist()
    assert not none
    assert not empty.any()
    found = task.score(loss.item(), 3, confusion.numpy())
    assert set(found) == set(task.metrics)


@given(confusion=arrays.arrays(np.int64, (3, 3), elements=st.integers(0, 9)).filter(np.any))
@settings(deadline=None, max_examples=50)
def test_the_scores_are_those_of_torchmetrics(confusion: np.ndarray) -> None:
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score

    true, given = (torch.from_numpy(np.repeat(each, confusion.reshape(-1))) for each in np.divmod(np.arange(9), 3))
    accuracy, macro_f1 = accuracy_and_macro_f1(confusion)
    assert accuracy == pytest.approx(float(multiclass_accuracy(given, true, 3, average="micro")), abs=1e-6)
    assert macro_f1 == pytest.approx(float(multiclass_f1_score(given, true, 3, average="macro")), abs=1e-6)


@given(st.data())
def test_the_metrics_of_answers_are_those_of_torchmetrics_and_add_up(data: st.DataObject) -> None:
    labels = ["a", "b", "c"]
    task = Classification(Config(task="classification"), FACTS | {"labels": labels})
    # Of random digits, as at the edge of two bins of confidence rounding would decide.
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = random.dirichlet([1.0, 1.0, 1.0], data.draw(st.integers(1, 30)))
    table = {
        "label": [data.draw(st.sampled_from(labels)) for _ in rows],
        "label_given": [labels[row.argmax()] for row in rows],
        "probability": rows.max(1).tolist(),
        "probabilities": rows.tolist(),
        "loss": [1.0] * len(rows),
        "targets": [1] * len(rows),
    }
    ours, theirs = task.grades(table)(np.ones(len(rows))), task.grade(table)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-5), name  # torchmetrics computes in fp32
    twice = {name: values * 2 for name, values in table.items()}
    weights = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))) + 1.0
    drawn = np.concatenate((np.ones(len(rows)), weights - 1))
    assert task.grades(twice)(drawn) == pytest.approx(task.grades(table)(weights))


@pytest.mark.parametrize("edge", [6, 9, 12])
def test_a_confidence_at_the_edge_of_two_bins_counts_with_those_above(edge: int) -> None:
    """One right and one wrong answer in a bin: the gap is that of their means. In two bins gaps would sum."""
    task = Classification(Config(task="classification"), FACTS)
    lowest = np.linspace(0, 1, BINS + 1)[edge]
    confidence = np.array([lowest, lowest + 0.01])
    table = {
        "label": ["yes", "yes"],
        "label_given": ["yes", "no"],
        "probability": confidence.tolist(),
        "loss": [1.0, 1.0],
        "targets": [1, 1],
    }
    error = task.grades(table)(np.ones(2))["calibration_error"]
    assert error == pytest.approx(abs(0.5 - confidence.mean()))


def test_an_encoder_reads_a_text_as_its_own_tokenizer_writes_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Theirs

    file = write_encoder(tmp_path / "base", "bert") / "tokenizer.json"
    settings = TokenizerConfig(kind="file", file=str(file))
    config = Config(task="classification", model=replace(ENCODERS["bert"], context=8), tokenizer=settings)
    encoder = train_tokenizer(settings, [], Folder(str(tmp_path / "tokenizer")), lambda _: None)
    task = build_task(config, None, {"tokenizer": encoder})
    facts = task.learn([task.survey([("the market rose", "up"), ("the market fell", "down")])])
    task = task.knowing(facts, {"tokenizer": encoder})
    theirs = Theirs.from_file(str(file))
    theirs.enable_truncation(8)
    for text in ("", "The market rose!", "the team won a game, the market fell, a bank lost"):
        label, *ids = task.encode((text, "up"))[0].tolist()
        assert label == 1
        assert ids == theirs.encode(text).ids
    forged = task.encode(("the [SEP] market",))[0].tolist()
    assert forged.count(theirs.token_to_id("[SEP]")) == 1
    assert task.decode(task.encode(("the market rose!", "up"))[0], None) == ("the market rose!", "up")
    # What stands around texts, and where they are cut, is part of what was prepared.
    assert task.shaped_by() != task.under(replace(config, model=replace(config.model, context=9))).shaped_by()
    assert _task().shaped_by() == {"context": 6}


def test_texts_that_are_cut_elsewhere_are_other_data(tmp_path: Path) -> None:
    """Otherwise a longer context would train on the truncated texts of a shorter one."""
    (tmp_path / "rows.csv").write_text("label,text\nspam,free money\nham,see you at noon\n")
    data = DataConfig(source=str(tmp_path / "rows.csv"), validation="tail", validation_fraction=0.5)
    found = set()
    for context in (6, 30):
        config = Config(
            task="classification", data=data, model=ModelConfig(context=context), tokenizer=TokenizerConfig(kind="bytes")
        )
        task = build_task(config)
        found.add(compute_fingerprint(config, task, *open_sources(config, task)))
    assert len(found) == 2
