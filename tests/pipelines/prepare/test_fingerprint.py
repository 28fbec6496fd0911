"""What was prepared by an earlier version is found again: fingerprints of settings at their defaults do not move."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, Tokenizer
from raystride.pipelines.prepare.fingerprint import Identity, fingerprint
from raystride.pipelines.tasks.language_model import LanguageModel
from tests.pipelines.conftest import settings


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A source whose identity is the same on any machine and day."""
    path = tmp_path / "text.txt"
    path.write_text("the same bytes\n" * 100)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def _fingerprint(config: Config) -> str:
    return fingerprint(config, LanguageModel(config))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (Tokenizer(kind="bytes"), "7cb7d71d8a3ad944"),
        (Tokenizer(kind="characters"), "f5c5dbe0a2cba8e5"),
        (Tokenizer(kind="bpe"), "efef7fca409d3f23"),
    ],
    ids=lambda value: value.kind if isinstance(value, Tokenizer) else value,
)
def test_settings_at_their_defaults_keep_their_fingerprint(corpus: Path, tokenizer: Tokenizer, expected: str) -> None:
    assert _fingerprint(replace(settings(corpus), tokenizer=tokenizer)) == expected


def test_a_tokenizer_that_is_blind_to_case_has_data_of_its_own(corpus: Path) -> None:
    lower = replace(settings(corpus), tokenizer=Tokenizer(kind="bpe", lowercase=True))
    assert _fingerprint(lower) != _fingerprint(replace(lower, tokenizer=Tokenizer(kind="bpe")))


def test_a_run_goes_on_with_its_own_data_and_a_mixture_with_other_sources() -> None:
    alone = Identity("a")
    assert alone.goes_on("a", {})
    assert not alone.goes_on("b", {})
    assert not alone.goes_on(None, {})
    mixed = Identity("m", {"code": "c", "text": "t"})
    assert mixed.goes_on("other", {"code": "c", "new": "n"}), "a source has come, and one gone"
    assert not mixed.goes_on("m", {"code": "changed", "text": "t"})
    assert not mixed.goes_on("other", {}), "before it was one source"
    assert mixed.of("code") == "c"
    assert alone.of("") == "a"
