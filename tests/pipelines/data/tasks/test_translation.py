"""Pairs as fed to a translator, and BLEU and chrF from counts summed over batches and workers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, ModelConfig, TokenizerConfig, ValidationConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks import translation as overlap_module
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tasks.translation import Overlap, Translation
from raystride.pipelines.data.tokenizers.byte_pairs import CharacterEncoder
from tests.errors import refused

ONE, OTHER = CharacterEncoder("abcd "), CharacterEncoder("wxyz")


def _task(*, shared: bool = True, context: int = 8) -> Translation:
    config = Config(
        task="translation",
        model=ModelConfig(architecture="original", layers=1, heads=1, hidden_size=8, context=context),
        tokenizer=TokenizerConfig(kind="characters", shared=shared),
    )
    encoders = {"tokenizer": ONE} if shared else {"tokenizer": ONE, "target_tokenizer": OTHER}
    task = build_task(config, build_task(config, {}, encoders).learn([]), encoders)
    assert isinstance(task, Translation)
    return task


def test_the_decoder_reads_the_target_one_later_behind_its_end() -> None:
    task = _task(shared=False)
    rows = [task.encode(pair)[0] for pair in (("ab", "wx"), ("c", "zzz"))]
    (source, lengths, target_inputs), targets = task.collate(rows, None)
    end = ONE.end_id
    assert source.tolist() == [[2, 3, end], [4, end, 0]]
    assert lengths.tolist() == [3, 2]
    assert target_inputs.tolist() == [[OTHER.end_id, 2, 3, 0], [OTHER.end_id, 5, 5, 5]]
    assert targets.tolist() == [[2, 3, OTHER.end_id, IGNORED], [5, 5, 5, OTHER.end_id]]
    firsts, sizes = np.array([row[0] for row in rows]), np.array([len(row) for row in rows])
    assert task.sizes(firsts, sizes).tolist() == [[3, 3], [2, 4]]
    assert (task.collate(rows, [np.zeros(len(row), bool) for row in rows])[1] == IGNORED).all()


@given(source=st.text("abcd", max_size=20), target=st.text("abcd", max_size=20))
def test_both_sides_fit_the_context(source: str, target: str) -> None:
    task = _task(context=8)
    row, _ = task.encode((source, target))
    (ids, lengths, target_inputs), targets = task.collate([row], None)
    assert ids.shape[1] == lengths.item() == min(len(source), 7) + 1
    assert target_inputs.shape == targets.shape == (1, min(len(target), 7) + 1)
    assert row.max() < task.ids


def test_each_vocabulary_is_trained_on_its_side() -> None:
    assert list(_task().texts(("a", "b"), "tokenizer")) == ["a", "b"]
    assert list(_task(shared=False).texts(("a", "b"), "tokenizer")) == ["a"]
    assert list(_task(shared=False).texts(("a", "b"), "target_tokenizer")) == ["b"]


@pytest.mark.parametrize("shared", [True, False])
def test_validation_translates_and_counts(shared: bool) -> None:
    task = _task(shared=shared)
    torch.manual_seed(0)
    model = task.build_model().eval()
    rows = [task.encode(pair)[0] for pair in (("ab", "xw" if not shared else "ba"), ("c", "z"))]
    inputs, targets = task.collate(rows, None)
    with torch.no_grad():
        loss, counted, counts = task.measure(model, inputs, targets)
        alone = sum(task.measure(model, *task.collate([row], None))[2] for row in rows)
        together = task.measure(model, inputs, targets, together=True)[2]
    assert int(counted) == 5
    assert torch.equal(counts, alone)
    assert together.shape == counts.shape == (task.counted,)
    assert set(task.score(loss.item(), 5, counts.numpy())) == set(task.metrics)


WORDS = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", ".", "ist", "Katze,"]), min_size=1, max_size=12)


@given(pairs=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_scores_from_added_counts_are_those_of_the_corpus(pairs: list[tuple[list[str], list[str]]]) -> None:
    texts, references = ([" ".join(pair[side]) for pair in pairs] for side in (0, 1))
    overlap = Overlap()
    counts = sum(overlap.counts([text], [reference])[0] for text, reference in zip(texts, references, strict=True))
    assert isinstance(counts, np.ndarray)
    assert counts.shape == (Overlap.NUM_COUNTS,)
    import sacrebleu

    assert overlap.bleu(counts) == pytest.approx(sacrebleu.corpus_bleu(texts, [references]).score)
    assert overlap.chrf(counts) == pytest.approx(sacrebleu.corpus_chrf(texts, [references]).score)


CHINESE = ["猫坐在垫子上，看着窗外的雨。", "我们明天早上去北京开会。"]
JAPANESE = ["猫はマットの上に座って、窓の外の雨を見ている。", "私たちは明日の朝、東京へ行きます。"]
KOREAN = ["고양이가 매트 위에 앉아 있다.", "우리는 내일 아침에 서울로 간다."]
GERMAN = ["Die Katze saß auf der Matte.", "Das chinesische Wort 猫 heißt Katze."]


CUT = [(CHINESE, "zh"), (JAPANESE, "char"), (KOREAN, "char"), (GERMAN, "13a"), ([], "13a"), (["42"], "13a")]


@pytest.mark.parametrize(("references", "chosen"), CUT)
def test_words_for_bleu_are_cut_as_the_references_are_written(references: list[str], chosen: str) -> None:
    import sacrebleu

    task = _task()
    line = task.see_held_out(("", reference) for reference in references)
    assert f"`{chosen}`" in line
    assert f"tok:{chosen}" in task.signatures["bleu"]
    if not references:
        return
    texts = [text.replace("在", "於").replace("a", "e") for text in references]
    table = {"translation": texts, task.columns[1].name: references, "loss": [1.0] * len(texts), "targets": [1] * len(texts)}
    expected = sacrebleu.corpus_bleu(texts, [references], tokenize=chosen).score
    earlier = _task()  # a run of an earlier version learned nothing of its references
    for each in (task, earlier):
        assert each.grade(table)["bleu"] == pytest.approx(expected)
        assert f"tok:{chosen}" in each.signatures["bleu"]


def test_the_word_cutter_of_bleu_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(_task().config, validation=ValidationConfig(bleu_tokenizer="char"))
    task = build_task(config)
    assert not task.see_held_out([("", text) for text in CHINESE])
    assert "tok:char" in task.signatures["bleu"]
    monkeypatch.setattr(overlap_module, "find_spec", lambda name: None)
    for name, package in (("ja-mecab", "sacrebleu[ja]"), ("ko-mecab", "sacrebleu[ko]"), ("flores200", "sentencepiece")):
        with refused("validation.bleu_tokenizer", name, names=[package]):
            build_task(replace(config, validation=ValidationConfig(bleu_tokenizer=name)))  # type: ignore[arg-type]
