"""Reference log-probabilities equal those of the folder's model for any batches, and numbers survive as ids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raystride.pipelines.data.tasks.reference as module
from raystride.pipelines.data.pretrained import load_base_weights
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.preference import Preference
from raystride.pipelines.data.tasks.reference import Reference, floats_to_ids, ids_to_floats, weights_sha256
from raystride.pipelines.data.tokenizers import load_tokenizer, train_tokenizer
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.preferences import pair_settings, write_base


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=5))
def test_numbers_are_ids_below_two_to_the_sixteenth(values: list[float]) -> None:
    ids = floats_to_ids(np.array(values, np.float32))
    assert len(ids) == 2 * len(values)
    assert ids.max(initial=0) < 2**16
    for kind in (np.uint16, np.uint32, np.int64):
        assert ids_to_floats(ids.astype(kind)).tolist() == values


def test_the_order_and_the_size_of_batches_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base(tmp_path)
    config = pair_settings(base, tmp_path)
    place = Folder(f"{tmp_path}/data")
    train_tokenizer(config.tokenizer, [], place / "tokenizer", lambda _: None)
    encoder = load_tokenizer(place / "tokenizer")
    facts = {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}
    task = build_task(config, facts, {"tokenizer": encoder})
    assert isinstance(task, Preference)
    rows = [task.encode(("is it?" * (1 + n % 4), " yes" * (1 + n), " no"))[0] for n in range(9)]
    model = task.build_model()
    load_base_weights(model, str(base), place / "tokenizer", lambda _: None)
    with torch.no_grad():
        expected = [model.log_probabilities(*task.sequences([row])).tolist() for row in rows]
    before = torch.get_rng_state()
    for most in (40, 1 << 14):
        monkeypatch.setattr(module, "MAX_BATCH_TOKENS", most)
        reference = Reference(task.build_model, str(base), place / "tokenizer")
        sizes = [2 * int(row[0]) for row in rows]
        found = reference.log_probabilities(sizes, lambda some: task.sequences([rows[each] for each in some]))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before), "what training draws does not follow from it"


def test_one_hash_of_a_base_follows_its_weights_and_not_its_place(tmp_path: Path) -> None:
    first, other = (write_base(tmp_path / name) for name in ("a", "b") if not (tmp_path / name).mkdir())
    assert weights_sha256(str(first)) == weights_sha256(str(other))
    third = tmp_path / "c"
    third.mkdir()
    assert weights_sha256(str(write_base(third, seed=2))) != weights_sha256(str(first))
    with refused("model.init_from", str(third), names=["config.json"]):
        weights_sha256(str(third))
