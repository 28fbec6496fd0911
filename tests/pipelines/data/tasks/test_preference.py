"""Pairs of answers: masks, truncation, properties of the losses, and figures that can be summed."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.preference import PairRule, PreferenceDecoder, answer_lengths, pair_figures, pair_losses
from raystride.pipelines.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    SettingError,
    TokenizerConfig,
    TrainConfig,
)
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.preference import Preference
from raystride.pipelines.data.tasks.task import IGNORED
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from tests.errors import refused

END = ByteEncoder.end_id
FACTS = {"vocabulary_size": 257, "end_id": END}
TEXTS = st.text("abc", min_size=1, max_size=30)
PAIRS = st.lists(st.tuples(TEXTS, TEXTS, st.text("xyz", min_size=1, max_size=30)), min_size=1, max_size=4)
"""Prompts, chosen and rejected answers, which differ."""


class _Turns:
    """A chat template that writes roles and contents, byte by byte."""

    def question(self, prompt: Any) -> np.ndarray:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._bytes("".join(f"{each['role'][0]}:{each['content']};" for each in turns) + "a:")

    def exchange(self, prompt: Any, completion: Any) -> tuple[np.ndarray, int]:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        asked = self.question(prompt)
        return np.concatenate((asked, self._bytes(f"{text};"))), len(asked)

    def _bytes(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


class _Chatting(ByteEncoder):
    chat = _Turns()  # type: ignore[assignment]


def _task(context: int = 64, *, chat: bool = False, data: DataConfig | None = None, **objective: Any) -> Preference:
    config = Config(
        task="preference",
        model=ModelConfig(layers=1, heads=2, hidden_size=16, context=context),
        data=data or DataConfig(),
        tokenizer=TokenizerConfig(kind="bytes"),
        objective=ObjectiveConfig(**{"reference_free": True} | objective),
        train=TrainConfig(steps=1),
    )
    task = build_task(config, FACTS, {"tokenizer": _Chatting() if chat else ByteEncoder()})
    assert isinstance(task, Preference)
    return task


def _model(task: Preference, seed: int = 0) -> PreferenceDecoder:
    torch.manual_seed(seed)
    return task.build_model()


@pytest.mark.parametrize("chat", [False, True])
def test_answers_that_become_the_same_when_they_are_cut_raise(chat: bool) -> None:
    task, same = _task(16, chat=chat), "a" * 20
    with pytest.raises(ValueError, match=r"the same once they are cut to model\.context, 16 tokens"):
        task.encode(("is it?", same + "b", same + "c"))
    assert len(task.encode(("is it?", "b" + same, "c" + same))[0])


def _answer_text(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_answers_and_their_ends_count_and_the_prompt_does_not() -> None:
    task = _task()
    rows = [task.encode(each)[0] for each in (("2+2=", "4", "five"), ("x", "yz", "y"))]
    (ids, words, reference), targets = task.collate(rows, None)
    assert ids.tolist() == [
        [*b"2+2=4", 0, 0, 0],
        [*b"xyz", 0, 0, 0, 0, 0],
        [*b"2+2=five"],
        [*b"xy", 0, 0, 0, 0, 0, 0],
    ]
    none = [IGNORED]
    assert words.tolist() == [
        none * 3 + [ord("4"), END] + none * 3,
        [*b"yz", END] + none * 5,
        none * 3 + [*b"five", END],
        [ord("y"), END] + none * 6,
    ]
    assert not reference.any()
    assert targets.tolist() == [0, 0]
    assert answer_lengths(words).tolist() == [[2, 5], [3, 2]]
    _, nobody = task.collate(rows, [np.zeros(len(row), bool) for row in rows])
    assert nobody.tolist() == [IGNORED, IGNORED]


@given(prompt=TEXTS, chosen=st.text("xy", min_size=1, max_size=40), rejected=st.text("z", min_size=1, max_size=40),
       context=st.integers(1, 40))  # fmt: skip
def test_long_pairs_lose_the_prompts_beginning_first(prompt: str, chosen: str, rejected: str, context: int) -> None:
    task = _task(context)
    row, _ = task.encode((prompt, chosen, rejected))
    (ids, words, _), _ = task.collate([row], None)
    whole, longest = len(prompt) + max(len(chosen), len(rejected)) + 1, max(len(chosen), len(rejected)) + 1
    assert task.is_cut(row) == (whole > context + 1)
    assert ids.shape[1] == min(whole, context + 1) - 1 == int(row[0]) - 1
    kept = prompt[-max(1, context + 1 - longest) :] if whole > context + 1 else prompt
    for side, answer in enumerate((chosen, rejected)):
        expected = [*kept.encode(), *answer.encode(), END][: context + 1]
        count = (words[side] != IGNORED).sum()
        assert ids[side, : len(expected) - 1].tolist() == expected[:-1]
        assert words[side][words[side] != IGNORED].tolist() == expected[len(kept) :]
        assert count == len(expected) - len(kept)


@given(pairs=PAIRS)
def test_losses_are_those_of_log_softmax_whatever_stands_beside(pairs: list[tuple[str, str, str]]) -> None:
    task = _task(label_smoothing=0.2, beta=0.3)
    model = _model(task)
    inputs, targets = task.collate([task.encode(pair)[0] for pair in pairs], None)
    loss, counted = model(*inputs, targets)
    expected = 0.0
    for prompt, *answers in pairs:
        sums = []
        for answer in answers:
            ids = torch.tensor([[*f"{prompt}{answer}".encode(), END]])
            found = model.logits(model.hidden(ids[:, :-1])).log_softmax(-1)
            each = found.gather(-1, ids[:, 1:, None])[0, len(prompt.encode()) - 1 :]
            sums.append(float(each.sum().detach()))
        margin = 0.3 * (sums[0] - sums[1])
        expected += 0.8 * math.log1p(math.exp(-margin)) + 0.2 * math.log1p(math.exp(margin))
    assert int(counted) == len(pairs)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@given(
    st.lists(st.tuples(*[st.floats(-50, 50)] * 2), min_size=1, max_size=5), st.floats(0.01, 1), st.sampled_from([0.0, 0.3])
)
def test_swapping_the_answers_negates_the_margin(ratios: list[tuple[float, float]], beta: float, smoothing: float) -> None:
    found = torch.tensor(ratios, dtype=torch.float64)
    counts = torch.ones(len(found), dtype=torch.bool)
    one, other = pair_figures(found, counts, beta), pair_figures(found.flip(1), counts, beta)
    torch.testing.assert_close(one[:, 2], -other[:, 2])
    torch.testing.assert_close(one[:, 3:5], other[:, 3:5].flip(1))
    torch.testing.assert_close(one[:, 5], other[:, 5])
    lengths, rule = torch.ones_like(found), PairRule("dpo", beta, smoothing)
    # -log sigmoid(h) + log sigmoid(-h) = -h, of which label smoothing leaves the share 1 - 2 s.
    difference = pair_losses(found, lengths, rule) - pair_losses(found.flip(1), lengths, rule)
    torch.testing.assert_close(difference, -(1 - 2 * smoothing) * one[:, 2])


def test_the_gradient_of_dpo_is_that_of_the_papers_seventh_equation() -> None:
    """d loss / d r_c = -b sigmoid(-b h), and the other way round for the rejected answer."""
    ratios = torch.tensor([[0.5, -1.0], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    pair_losses(ratios, torch.ones(2, 2), PairRule(beta=0.5)).sum().backward()
    share = 0.5 * torch.sigmoid(-0.5 * (ratios[:, 0] - ratios[:, 1]))
    torch.testing.assert_close(ratios.grad, torch.stack((-share, share), 1))


def test_ipo_draws_the_difference_of_means_to_half_its_inverse_beta() -> None:
    lengths, rule = torch.tensor([[4, 2]]), PairRule("ipo", beta=0.25)
    ratios = torch.tensor([[12.0, 2.0]])
    assert pair_losses(ratios, lengths, rule).item() == 0, "12 / 4 - 2 / 2 = 1 / (2 * 0.25)"
    assert pair_losses(ratios * 0, lengths, rule).item() == 4


def test_pairs_that_do_not_count_change_nothing() -> None:
    task = _task()
    model = _model(task)
    rows = [task.encode(each)[0] for each in (("ab", "c", "d"), ("ef", "gh", "i"))]
    inputs, targets = task.collate(rows, None)
    targets[1] = IGNORED
    loss, counted = model(*inputs, targets)
    alone, _ = model(*task.collate(rows[:1], None)[0], targets[:1])
    assert int(counted) == 1
    assert float(loss) == pytest.approx(float(alone), rel=1e-5)
    loss.backward()
    figures = model.pop_figures()
    assert figures is not None
    assert figures[0] == 2, "of both calls"
    empty, none = model(*inputs, torch.full_like(targets, IGNORED))
    assert (float(empty), int(none)) == (0.0, 0)


def test_validation_and_training_have_the_same_figures() -> None:
    task = _task(beta=0.5)
    model = _model(task)
    rows = [task.encode((f"p{i}", "a" * i, "b"))[0] for i in range(1, 5)]
    inputs, targets = task.collate(rows, None)
    model(*inputs, targets)
    sums = task.take_sums(model)
    assert sums is not None
    trained = task.train_scores(sums.tolist())
    model.eval()
    loss, counted, figures = task.measure(model, inputs, targets)
    scored = task.score(float(loss), float(counted), figures.numpy())
    assert set(scored) == set(task.metrics)
    assert "val_kl" not in scored, "there is no reference"
    for name, value in trained.items():
        assert scored[name.replace("train", "val")] == pytest.approx(value, abs=2**-19)
    assert torch.equal(figures, figures.round()), "whole numbers, whose sums have no order"
    losses, counts = task.losses(model, inputs, targets)
    assert float(losses.sum()) == pytest.approx(float(loss))
    answers = task.answer(model, inputs)
    both = task.answer_with_losses(model, inputs, targets)
    assert both[0] == answers
    assert torch.equal(both[1], losses)
    assert torch.equal(both[2], counts)
    table = {"loss": losses.tolist(), "targets": counts.tolist()}
    table |= {name: [each[name] for each in answers] for name in ("chosen_reward", "rejected_reward")}
    graded = task.grade(table)
    assert graded["margin"] == pytest.approx(scored["val_margin"], abs=1e-5)
    assert graded["accuracy"] == scored["val_accuracy"]


def test_a_pair_is_padded_by_its_longer_answer_twice() -> None:
    assert _task().sizes(np.array([3, 9]), np.array([20, 30])).tolist() == [[3, 3], [9, 9]]


def test_messages_are_written_as_a_chat() -> None:
    task = _task(chat=True)
    prompt = [_answer_text("system", "S"), _answer_text("user", "Q")]
    chosen, rejected = ([_answer_text("assistant", each)] for each in ("yes", "no"))
    row, _ = task.encode((json.dumps(prompt), json.dumps(chosen), json.dumps(rejected)))
    assert bytes(row[4 : 4 + int(row[1])].astype(np.uint8)) == b"s:S;u:Q;a:yes;"
    assert bytes(row[4 + int(row[1]) :].astype(np.uint8)) == b"s:S;u:Q;a:no;"
    plain, _ = task.encode(("Q", "yes", "no"))
    assert bytes(plain[4 : 4 + int(plain[1])].astype(np.uint8)) == b"u:Q;a:yes;", "a text is what a user says"
    shared = _task(chat=True, data=DataConfig(prompt_column=None))
    assert [column.name for column in shared.columns] == ["chosen", "rejected"]
    same, _ = shared.encode((json.dumps(prompt + chosen), json.dumps(prompt + rejected)))
    assert np.array_equal(same, row), "the prompt is what both begin with"
    assert list(task.texts((json.dumps(prompt), "a", "b"), "tokenizer")) == ["S", "Q", "a", "b"]


@pytest.mark.parametrize(
    ("chat", "prompt", "document", "reason"),
    [
        (False, "prompt", ("Q", "same", "same"), "two answers that are the same"),
        (False, "prompt", ('[{"role": "user", "content": "Q"}]', "a", "b"), "no chat template"),
        (True, None, ("text", "other"), r"data\.prompt_column"),
        (True, None, ('[{"role": "user", "content": "a"}]', '[{"role": "user", "content": "b"}]'), "has no prompt"),
    ],
)
def test_a_pair_that_teaches_nothing_is_a_fault(chat: bool, prompt: Any, document: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _task(chat=chat, data=DataConfig(prompt_column=prompt)).encode(document)


@pytest.mark.parametrize(
    ("task", "objective", "setting"),
    [
        ("preference", {"reference_free": True, "label_smoothing": 0.5}, r"objective\.label_smoothing"),
        ("preference", {"reference_free": True, "preference": "ipo", "label_smoothing": 0.1}, "ipo"),
        ("completion", {"beta": 0.2}, r"objective\.beta"),
        ("completion", {"reference_free": True}, r"objective\.reference_free"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(task: str, objective: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError, match=setting):
        Config(task=task, objective=ObjectiveConfig(**objective))


def test_logits_with_a_bound_are_refused() -> None:
    with refused("model.logit_softcap", 30.0, names=["`preference`"]):
        Config(task="preference", model=ModelConfig(logit_softcap=30.0), objective=ObjectiveConfig(reference_free=True))


def test_a_reference_is_asked_for() -> None:
    with refused("model.init_from", names=["objective.reference_free"]):
        build_task(Config(task="preference"))
