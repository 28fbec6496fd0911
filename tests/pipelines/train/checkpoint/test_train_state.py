"""A loop's position comes back from a manifest, and links a checkpoint to its parent."""

import json
from typing import Any

from raystride.pipelines.data.feed.loader import Step
from raystride.pipelines.train.checkpoint.train_state import SkippedSlot, TrainState


def _step(number: int, digest: int) -> Step:
    return Step(number=number, position=8 * number, samples=8, micro_batches=[], digest=digest)


def _through_json(state: TrainState, **more: Any) -> TrainState:
    return TrainState.from_json(json.loads(json.dumps(state.to_json())) | more)


def test_a_state_comes_back_as_it_was_but_for_the_link_to_its_parent() -> None:
    state = TrainState(step=3, position=24, tokens_seen=9, best=1.5, best_step=2, dropped=[1], rewinds=2)
    state.left_out = [SkippedSlot(2, 1, 18, 2)]
    state.parent_step, state.parent_position, state.fed_digest, state.saved = 2, 16, 7, True
    found = _through_json(state, of_a_later_version=1)
    assert found.left_out == [SkippedSlot(2, 1, 18, 2)]
    assert found.to_json() == state.to_json()
    assert (found.parent_step, found.parent_position, found.fed_digest, found.saved) == (0, 0, 0, False)


def test_what_was_fed_is_counted_since_the_last_save() -> None:
    state = TrainState()
    for number in range(2):
        state.advance(_step(number, 2**63))
    assert (state.step, state.position, state.fed_digest, state.parent_step) == (2, 16, 0, 0), "modulo 2^64"
    state.saved = True
    state.advance(_step(2, 5))
    assert (state.step, state.position, state.fed_digest) == (3, 24, 5)
    assert (state.parent_step, state.parent_position, state.saved) == (2, 16, False)
    state.advance(_step(3, 6))
    assert (state.fed_digest, state.parent_step) == (11, 2)
