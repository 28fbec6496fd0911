"""Language modelling: tokens of a sample, inputs of the model, and meaning of the score."""

import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, PredictorConfig, TokenizerConfig, TrainConfig
from raystride.pipelines.data.feed.samples import count_windows
from raystride.pipelines.data.prepare.fingerprint import identity
from raystride.pipelines.data.prepare.prepare import prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.pieces import Piece
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tokenizers import train_tokenizer
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder
from tests.bases import write_tokenizer
from tests.errors import refused
from tests.pipelines.conftest import rows as rows_of
from tests.tiny import tiny


def _task(context: int, **train: Any) -> LanguageModel:
    config = Config(model=ModelConfig(layers=1, heads=1, hidden_size=4, context=context), train=TrainConfig(**train))
    return LanguageModel(config, {"vocabulary_size": 10, "end_id": 9}, {"tokenizer": ByteEncoder()})


def test_the_setting_chooses_the_task() -> None:
    task: Task = build_task(Config())
    assert isinstance(task, LanguageModel)


def test_a_document_is_its_ids_and_an_end() -> None:
    ids, mask = _task(4).encode(("hé",))
    assert ids.tolist() == [*"hé".encode(), ByteEncoder().end_id]
    assert ids.dtype == np.uint32
    assert mask is None
    assert _task(4).encode(("",))[0].tolist() == [ByteEncoder().end_id]


@given(tokens=st.integers(0, 500), context=st.integers(1, 40))
def test_windows_predict_every_token_once_up_to_the_tail(tokens: int, context: int) -> None:
    task = _task(context)
    samples, window = count_windows(task, tokens), task.window
    assert window
    firsts, length = np.arange(samples) * window.stride, window.length
    predicted = [token for first in firsts for token in range(first + 1, first + length)]
    assert predicted == list(range(1, samples * context + 1))
    assert all(first + length <= tokens for first in firsts)
    assert tokens - (samples * context + 1) < context or not samples
    if not samples:
        assert tokens <= context


def test_targets_are_the_next_tokens() -> None:
    windows = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.int64)
    (inputs,), targets = _task(3).collate(windows, None)
    assert inputs.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert targets.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_a_masked_token_is_read_and_not_predicted() -> None:
    windows = np.array([[1, 2, 3, 4]], dtype=np.int64)
    (inputs,), targets = _task(3).collate(windows, np.array([[False, True, False, True]]))
    assert inputs.tolist() == [[1, 2, 3]]
    assert targets.tolist() == [[2, IGNORED, 4]]


def _loss(task: LanguageModel, model: Decoder, windows: np.ndarray, mask: np.ndarray) -> tuple[torch.Tensor, ...]:
    inputs, targets = task.collate(windows, mask)
    return model(*inputs, targets)  # type: ignore[no-any-return]


def test_the_model_counts_only_unmasked_targets() -> None:
    task = _task(3)
    torch.manual_seed(0)
    model = task.build_model()
    assert isinstance(model, Decoder)
    windows = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.int64)
    mask = np.array([[True, True, False, True], [True, False, False, False]])
    loss, count = _loss(task, model, windows, mask)
    assert int(count) == 2
    alone = sum(_loss(task, model, windows[:1], np.eye(1, 4, k=k, dtype=bool))[0].item() for k in (1, 3))
    assert loss.item() == pytest.approx(alone, rel=1e-5)


def test_the_score_is_the_mean_loss_and_its_perplexity() -> None:
    assert _task(3).score(20.0, 10.0, np.empty(0)) == {"val_loss": 2.0, "val_perplexity": pytest.approx(math.exp(2.0))}
    assert _task(3).score(1e6, 1.0, np.empty(0))["val_perplexity"] == math.inf
    assert math.isnan(_task(3).score(0.0, 0.0, np.empty(0))["val_loss"])


def test_packed_documents_begin_with_the_end_token_before_them() -> None:
    task = _task(4, packing="documents")
    (inputs, documents), targets = task.collate(np.array([[1, 2, 9, 3, 4], [9, 9, 5, 6, 9]]), None)
    assert inputs.tolist() == [[1, 2, 9, 3], [9, 9, 5, 6]]
    assert targets.tolist() == [[2, 9, 3, 4], [9, 5, 6, 9]]
    assert documents.tolist() == [0, 2, 4, 5, 8]
    assert task.prompt("a").tolist() == [9, ord("a")]
    assert _task(4).prompt("a").tolist() == [ord("a")]


@given(st.lists(st.lists(st.sampled_from([1, 2, 3, 9]), min_size=7, max_size=7), min_size=1, max_size=4))
def test_a_packed_loss_is_that_of_its_documents_one_at_a_time(windows: list[list[int]]) -> None:
    task, single = _task(6, packing="documents"), _task(6)
    torch.manual_seed(0)
    model, alone = task.build_model(), single.build_model()
    alone.load_state_dict(model.state_dict())
    rows = np.array(windows)
    inputs, targets = task.collate(rows, None)
    loss, counted = model(*inputs, targets)
    documents = inputs[1].tolist()
    ids, wanted = inputs[0].flatten(), targets.flatten()
    expected = sum(float(alone(ids[None, a:b], wanted[None, a:b])[0]) for a, b in pairwise(documents))
    assert math.isclose(float(loss), expected, rel_tol=1e-6)
    assert int(counted) == wanted.numel()
    sums, counts = task.losses(model, inputs, targets)
    assert math.isclose(float(sums.sum()), expected, rel_tol=1e-6)
    assert counts.tolist() == [6] * len(windows)


BEGINNINGS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "gemma": ("<bos>", {}),
    "gpt2": (None, {}),
    "said beside the file": (None, {"add_bos_token": True}),
    "denied beside the file": ("<bos>", {"add_bos_token": False}),
    "the end token": ("<eos>", {"bos_token": "<eos>"}),
}


@pytest.mark.parametrize(("begin", "config"), BEGINNINGS.values(), ids=BEGINNINGS.keys())
@pytest.mark.parametrize("task", ["language_model", "completion"])
def test_texts_begin_as_transformers_begins_them(
    begin: str | None, config: dict[str, Any], task: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    ids = write_tokenizer(tmp_path / "base", {"<bos>": True, "<eos>": True}, names | config, begin)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "base"))("a text")["input_ids"]
    asked = TokenizerConfig(kind="file", file=f"{tmp_path}/base/tokenizer.json")
    encoder = train_tokenizer(asked, ["some text"], Folder(f"{tmp_path}/ours"), lambda _: None)
    assert [*encoder.begin_ids, *encoder.encode("a text").tolist()] == theirs
    made = build_task(Config(task=task, tokenizer=asked))
    made = made.knowing(made.knowing({}, {"tokenizer": encoder}).learn([]), {"tokenizer": encoder})
    end = ids["<eos>"]
    assert made.prompt("a text").tolist() == theirs
    assert made.prompt("").tolist() == ([*encoder.begin_ids] or ([end] if task == "completion" else []))
    if task == "completion":
        pair, mask = made.encode(("a text", "b"))
        assert mask is not None
        assert pair.tolist() == [*theirs, *encoder.encode("b").tolist(), end]
        assert not mask[: len(theirs)].any()
        return
    # In a stream a document stands behind the end token of another one.
    assert made.encode(("a text",))[0].tolist() == [*(theirs[1:] if theirs[0] == end else theirs), end]
    packed = made.under(replace(made.config, train=TrainConfig(packing="documents")))
    stream = np.concatenate([[end], *[packed.encode(("ab",))[0]] * 2]).astype(np.int64)
    (inputs, documents), _ = packed.collate(stream[None], None)
    begins = {0, *(np.flatnonzero(inputs[0].numpy() == (ids["<bos>"] if packed.begin_ids else end)).tolist())}
    assert documents.tolist() == [*sorted(begins), inputs.shape[1]]


def test_a_beginning_is_prepared_once_a_document_and_changes_no_other_fingerprint(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line of a text\n" * 80_000)  # 1.3 MB, of which each MiB is a piece
    os.utime(text, (1_700_000_000, 1_700_000_000))
    write_tokenizer(tmp_path / "base", {"<bos>": True, "<eos>": True}, {"eos_token": "<eos>"}, "<bos>")
    asked = TokenizerConfig(kind="file", file=f"{tmp_path}/base/tokenizer.json")
    config = tiny(text, tokenizer=asked)
    prepared = prepare(RunContext(config, Folder(f"{tmp_path}/runs"), log=lambda _: None), build_task(config), on_ray=False)
    found = [row for split in ("train", "validation") for row in rows_of(prepared, split)]
    assert len(found) > 2
    begin, end = prepared.manifest.facts["begin_ids"][0], prepared.manifest.facts["end_id"]
    for row in found:
        assert (row["ids"][0] == begin) == row["begins"], "only a document's beginning has one"
        assert (np.array(row["ids"]) == begin).sum() == row["begins"]
        assert (row["ids"][-1] == end) == row["ends"]
    without = replace(config, tokenizer=replace(asked, begin="none"))
    assert identity(without, build_task(without)).data == "a1b94dfba30626fc"
    assert identity(config, build_task(config)).data == prepared.manifest.fingerprint != "a1b94dfba30626fc"


def test_a_graded_document_is_predicted_from_its_beginning(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", {"<bos>": True, "<eos>": True}, {"eos_token": "<eos>"}, "<bos>")
    asked = TokenizerConfig(kind="file", file=f"{tmp_path}/base/tokenizer.json")
    encoder = train_tokenizer(asked, ["some text"], Folder(f"{tmp_path}/ours"), lambda _: None)
    config = Config(tokenizer=asked, model=ModelConfig(layers=1, heads=1, hidden_size=4, context=8))
    task = build_task(config, {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}, {"tokenizer": encoder})
    task = task.knowing(task.learn([]), task.encoders)
    model = task.build_model().eval()
    opened = LoadedModel(config, task, model, step=0, place=Folder(str(tmp_path)))
    predictor = Predictor(opened, PredictorConfig(run="run", device="cpu"), graded=True)
    text = "a text of some length"
    (scored, *rest) = predictor.predict([(text,)])
    stream = torch.tensor([[*encoder.begin_ids, *encoder.encode(text).tolist(), encoder.end_id]])
    with torch.no_grad():
        logits = model.logits(model.hidden(stream[:, :8]))  # type: ignore[operator]
    expected = torch.nn.functional.cross_entropy(logits[0], stream[0, 1:9], reduction="sum")
    assert scored["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert sum(row["targets"] for row in (scored, *rest)) == len(text) + 1
    # A stretch that begins no document is graded without it.
    (inner,) = predictor.build_examples(Piece(("abc",), begins=False, ends=False))
    assert inner.ids[:3].tolist() == encoder.encode("abc").tolist()


def test_documents_with_special_tokens_in_them_are_not_packed() -> None:
    packed = TrainConfig(packing="documents")
    asked = TokenizerConfig(kind="file", file="tokenizer.json", markers="special")
    with refused("tokenizer.markers", "special"):
        build_task(Config(tokenizer=asked, train=packed))
    build_task(Config(task="completion", tokenizer=asked, train=packed))  # whose documents are samples
