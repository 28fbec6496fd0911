"""Pairs as a translator is fed, and BLEU and chrF from counts that add up over batches and workers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, Model, Tokenizer
from raystride.pipelines.tasks import build_task
from raystride.pipelines.tasks.overlap import Overlap
from raystride.pipelines.tasks.task import IGNORED
from raystride.pipelines.tasks.translation import Translation
from raystride.pipelines.tokenizers.alphabets import CharacterEncoder

ONE, OTHER = CharacterEncoder("abcd "), CharacterEncoder("wxyz")


def _task(*, shared: bool = True, context: int = 8) -> Translation:
    config = Config(
        task="translation",
        model=Model(flavour="original", layers=1, heads=1, width=8, context=context),
        tokenizer=Tokenizer(kind="characters", shared=shared),
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
    assert counts.shape == (Overlap.NUMBERS,)
    import sacrebleu

    assert overlap.bleu(counts) == pytest.approx(sacrebleu.corpus_bleu(texts, [references]).score)
    assert overlap.chrf(counts) == pytest.approx(sacrebleu.corpus_chrf(texts, [references]).score)
