"""A pipeline of one worker, who has all stages: losses, gradients and the order of backwards, beside the decoder alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.attention import LayerCache
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.strategies.mesh.context import ContextSharder, LocalTokens
from raystride.pipelines.train.strategies.mesh.pipeline import DecoderStage, Pipeline, _StepData
from tests.distributed import run_distributed
from tests.forwards import MicroBatch, RecordingForward

WORDS, TOKENS, COUNT = 11, 6, 4


def batches_of(count: int = COUNT) -> list[MicroBatch]:
    """Slots 10, 11, ..., of which each has one target less than the one before, and which differ in rows and tokens."""
    random, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        shape = (1, TOKENS) if number % 3 == 0 else (2, TOKENS // 2) if number == 1 else (1, TOKENS + 2)
        ids, targets = (torch.randint(WORDS, shape, generator=random) for _ in range(2))
        if number == 2:
            targets[:, TOKENS:] = -100
        targets[0, :number] = -100
        found.append(MicroBatch(10 + number, (ids,), targets))
    return found


def decoder() -> Decoder:
    """One of four blocks, with the same values each time."""
    torch.manual_seed(0)
    return Decoder(ModelConfig(architecture="llama", layers=4, heads=2, hidden_size=8, context=TOKENS + 2), WORDS)


def _run(rank: int, world: int, schedule: Any) -> dict[str, Any]:
    """Two steps of all micro-batches, and forwards alone."""
    model, called, forward = decoder(), list[tuple[int, int, bool]](), RecordingForward(0.1, (100.0, 1000.0))
    ranges = [range(4)] if schedule == "1f1b" else [range(3), range(3, 4)]
    stages = {n: DecoderStage(model, own, first=own.start == 0, last=own.stop == 4) for n, own in enumerate(ranges)}

    @contextmanager
    def accumulate(stage: int, number: int, last: bool) -> Iterator[None]:
        called.append((stage, number, last))
        yield

    group = dist.group.WORLD
    assert group is not None
    device, stream = torch.device("cpu"), (8, torch.float32)
    pipeline = Pipeline(
        stages,
        [0] * len(ranges),
        group,
        schedule,
        sharder=ContextSharder(),
        shards=None,
        stream=stream,
        device=device,
        accumulate=accumulate,
    )
    pipeline.run_micro_batches(batches_of(), forward)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    first, kept = list(called), dict(pipeline.measured)
    made = pipeline._built
    pipeline.run_micro_batches(batches_of(), forward)
    found = {
        "measured": kept,
        "before": forward.measured,
        "slots": list(forward.slots),
        "called": (first, called[len(first) :]),
        "gradients": gradients,
        "slot": pipeline.slot(2),
        "kept": pipeline._built is made,
    }
    pipeline.run_micro_batches(batches_of()[:1] * COUNT, forward)  # smaller, and not by half
    found["still"] = pipeline._built is made
    pipeline.run_micro_batches(batches_of(2), forward)
    found["anew"] = (pipeline._built is made, pipeline.slot(1))
    with torch.no_grad():
        batch, caches = batches_of()[3], [LayerCache(TOKENS) for _ in range(4)]
        found["forward"] = pipeline.forward(*batch.inputs, batch.targets)
        found["hidden"] = pipeline.hidden(batch.inputs[0], caches=caches)
        found["lengths"] = [cache.length for cache in caches]
        found["logits"] = pipeline.logits(model.logits, WORDS, found["hidden"])
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_step_has_the_gradients_and_losses_of_the_decoder_alone(schedule: str) -> None:
    (found,) = run_distributed(_run, 1, schedule)
    model, batches = decoder(), batches_of()
    results = [model(*batch.inputs, batch.targets) for batch in batches]
    sum(loss for loss, _ in results).div(10).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad)
    assert found["measured"].keys() == set(range(COUNT))
    for number, (loss, counted) in enumerate(results):
        assert counted == TOKENS - number
        assert found["measured"][number].tolist() == pytest.approx([loss.item(), counted.item()], rel=1e-5, abs=1e-3)
    assert found["before"].tolist() == [100, 1000], "what was measured is added up later, slot by slot"
    stages = 1 if schedule == "1f1b" else 2
    assert sorted(found["slots"]) == sorted([10, 11, 12, 13] * 2 * stages)
    for called in found["called"]:
        for stage in range(stages):
            own = [(number, last) for at, number, last in called if at == stage]
            assert own == [(number, number == COUNT - 1) for number in range(COUNT)]
    assert (found["slot"], found["kept"], found["still"]) == (12, True, True)
    assert found["anew"] == (False, 11)
    with torch.no_grad():
        loss, counted = found["forward"]
        assert (loss.item(), int(counted)) == (pytest.approx(results[3][0].item(), rel=1e-5), TOKENS - 3)
        hidden = model.hidden(*batches[3].inputs)
        torch.testing.assert_close(found["hidden"], hidden)
        torch.testing.assert_close(found["logits"], model.logits(hidden))
    assert found["lengths"] == [TOKENS] * 4


def test_a_micro_batch_is_cut_once_a_step_and_its_length_is_told_each_time() -> None:
    cut, shards = [], SimpleNamespace(tokens=0)

    def sharder(inputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> LocalTokens:
        cut.append(int(inputs[0][0, 0]))
        return LocalTokens(inputs[0], None, None, targets)

    step = _StepData(sharder, shards)  # type: ignore[arg-type]
    lengths = (3, 5)
    batches = [MicroBatch(n, (torch.full((1, length), n),), torch.zeros(1, length)) for n, length in enumerate(lengths)]
    step.begin_step(batches, RecordingForward())
    for number in (1, 0, 1):
        assert step.local_tokens(number).ids is batches[number].inputs[0]
        assert shards.tokens == lengths[number]
    assert cut == [1, 0]
    step.begin_step(batches, RecordingForward())
    step.local_tokens(1)
    assert cut == [1, 0, 1]


@given(shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=4), workers=st.integers(1, 3))
def test_a_stage_takes_of_a_buffer_what_another_has_put_in(shapes: list[tuple[int, int]], workers: int) -> None:
    step = _StepData(ContextSharder(), SimpleNamespace(size=workers, tokens=0))  # type: ignore[arg-type]
    batches = [MicroBatch(0, (torch.zeros(shape, dtype=torch.int64),), torch.zeros(shape)) for shape in shapes]
    step.begin_step(batches, RecordingForward())
    step.buffer = (1, max(rows * -(-tokens // workers) for rows, tokens in shapes))
    for number, (rows, tokens) in enumerate(shapes):
        stream = torch.rand(rows, -(-tokens // workers), 2, requires_grad=True)
        buffer = step.pack_stream(stream)
        assert buffer.shape == (*step.buffer, 2)
        assert not buffer._is_view()
        assert torch.equal(step.unpack_stream(buffer, number), stream)
        (gradient,) = torch.autograd.grad(buffer, stream, torch.ones_like(buffer))
        assert torch.equal(gradient, torch.ones_like(stream))


@pytest.mark.parametrize(("tokens", "part"), [(6, 3), (7, 4), (1, 1)])
def test_the_stream_between_stages_has_a_workers_part_of_the_tokens(tokens: int, part: int) -> None:
    model, stream = decoder(), (8, torch.bfloat16)
    stages = {0: DecoderStage(model, range(4), first=True, last=True)}
    for shards, expected in ((SimpleNamespace(size=2), part), (None, tokens)):
        group: Any = None
        pipeline = Pipeline(
            stages,
            [0],
            group,
            "1f1b",
            sharder=ContextSharder(),
            shards=shards,
            stream=stream,
            device=torch.device("cpu"),
            accumulate=None,  # type: ignore[arg-type]
        )
        found = pipeline._empty_stream(2, tokens)
        assert (found.shape, found.dtype) == ((2, expected, 8), torch.bfloat16)
