"""Near-duplicates are the same ones however the source is cut, wherever they are looked for, and after an interruption."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config import Config, Data, SettingError, Train
from raystride.pipelines.prepare import near_duplicates
from raystride.pipelines.prepare.near_duplicates import signature
from tests.pipelines.conftest import documents, prepared
from tests.pipelines.conftest import settings as settings_of


def _texts(count: int) -> list[str]:
    """Each third text is one before it with a word changed."""
    draw, found = random.Random(1), list[str]()
    for number in range(count):
        words = [f"w{draw.randrange(5000)}" for _ in range(draw.randint(60, 90))]
        if number % 3 == 2:
            words = found[draw.randrange(0, number, 3)].split()
            words[-1] = "changed"
        found.append(" ".join(words))
    return found


def _prepare(folder: Path, texts: list[str], storage: str, on_ray: bool = False, **data: Any) -> Any:
    path = folder / "texts.jsonl"
    if not path.exists():  # a file that is written anew is another source
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = settings_of(path, **{"near_duplicates": 0.8, "validation_fraction": 0.2} | data)
    return prepared(config, folder / storage, on_ray=on_ray, echo=lambda _: None)


def _kept(result: Any) -> list[str]:
    return sorted(documents(result, "train") + documents(result, "validation"))


def test_later_ones_are_left_out_however_the_source_is_cut(tmp_path: Path) -> None:
    texts = _texts(300)
    wanted = sorted(text for number, text in enumerate(texts) if number % 3 != 2)
    for number, size in enumerate((32.0, 0.01)):
        result = _prepare(tmp_path, texts, str(number), shard_mib=size)
        assert _kept(result) == wanted
        assert result.manifest.source["dropped"] == {"near-duplicates": 100}
        assert not (result.folder / "signatures").names(), "only an interrupted preparation needs them"


def test_equal_texts_are_duplicates_at_any_threshold(tmp_path: Path) -> None:
    texts = _texts(6)
    result = _prepare(tmp_path, [*texts, texts[0], texts[4]], "equal", near_duplicates=1.0)
    assert _kept(result) == sorted(texts)


@pytest.mark.long
def test_ray_leaves_out_the_same(tmp_path: Path, ray_cluster: None) -> None:
    texts = _texts(300)
    here, there = (_prepare(tmp_path, texts, name, name == "ray", shard_mib=0.02) for name in ("here", "ray"))
    assert _kept(here) == _kept(there)
    assert here.manifest.splits == there.manifest.splits


def test_an_interrupted_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, signed = _texts(90), list[int]()
    whole = _prepare(tmp_path, texts, "whole", shard_mib=0.01)
    sign: Callable[..., None] = near_duplicates.sign_part

    def stops(job: Any, part: Any) -> None:
        if len(signed) == 2:
            raise KeyboardInterrupt
        signed.append(part.number)
        sign(job, part)

    monkeypatch.setattr(near_duplicates, "sign_part", stops)
    with pytest.raises(KeyboardInterrupt):
        _prepare(tmp_path, texts, "stopped", shard_mib=0.01)
    again: list[int] = []
    monkeypatch.setattr(near_duplicates, "sign_part", lambda job, part: (again.append(part.number), sign(job, part)))
    result = _prepare(tmp_path, texts, "stopped", shard_mib=0.01)
    assert not set(again) & set(signed)
    assert again
    assert result.manifest.splits == whole.manifest.splits


@given(st.lists(st.sampled_from(["a", "B", "c", "d"]), min_size=1, max_size=30), st.sampled_from([" ", "\n", "\t  "]))
@settings(deadline=None, max_examples=30)
def test_case_and_blanks_make_no_difference(words: list[str], blank: str) -> None:
    assert (signature(" ".join(words)) == signature(blank.join(words).upper())).all()


def test_an_estimate_is_near_what_two_texts_share() -> None:
    words = [f"w{number}" for number in range(400)]
    one, other = signature(" ".join(words)), signature(" ".join([*words[:300], *(f"v{number}" for number in range(100))]))
    shared = 296 / (2 * 396 - 296)
    assert abs(float((one == other).mean()) - shared) < 0.15


def test_what_cannot_know_all_documents_is_refused() -> None:
    with pytest.raises(SettingError, match=r"data.start_after_mib .*data.near_duplicates"):
        Config(data=Data(near_duplicates=0.8, start_after_mib=1.0), train=Train(steps=1))
