"""Preparations of an earlier version are found again: fingerprints of default settings do not change."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, DataConfig, TokenizerConfig
from raystride.pipelines.data.prepare.fingerprint import Identity, compute_fingerprint, hash_inputs, identity
from raystride.pipelines.data.prepare.opened_sources import open_sources
from raystride.pipelines.data.tasks.language_model import LanguageModel
from tests.pipelines.conftest import settings


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A source with the same identity on any machine and day."""
    path = tmp_path / "text.txt"
    path.write_text("the same bytes\n" * 100)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def _fingerprint(config: Config) -> str:
    return identity(config, LanguageModel(config)).data


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (TokenizerConfig(kind="bytes"), "7cb7d71d8a3ad944"),
        (TokenizerConfig(kind="characters"), "f5c5dbe0a2cba8e5"),
        (TokenizerConfig(kind="bpe"), "efef7fca409d3f23"),
    ],
    ids=lambda value: value.kind if isinstance(value, TokenizerConfig) else value,
)
def test_settings_at_their_defaults_keep_their_fingerprint(corpus: Path, tokenizer: TokenizerConfig, expected: str) -> None:
    assert _fingerprint(replace(settings(corpus), tokenizer=tokenizer)) == expected


def test_a_tokenizer_that_is_blind_to_case_has_data_of_its_own(corpus: Path) -> None:
    lower = replace(settings(corpus), tokenizer=TokenizerConfig(kind="bpe", lowercase=True))
    assert _fingerprint(lower) != _fingerprint(replace(lower, tokenizer=TokenizerConfig(kind="bpe")))


ROWS = {"csv": "text,other\na,b\n", "jsonl": '{"text": "a"}\n'}


@pytest.mark.parametrize("validation", [None, *ROWS])
@pytest.mark.parametrize("train", ROWS)
def test_a_table_is_read_anew_be_it_for_training_or_for_validation(
    tmp_path: Path, train: str, validation: str | None
) -> None:
    for kind, text in ROWS.items():
        for split in ("train", "validation"):
            (tmp_path / f"{split}.{kind}").write_text(text)
    own = {"validation": "source", "validation_source": str(tmp_path / f"validation.{validation}")} if validation else {}
    config = settings(tmp_path / f"train.{train}", column="text", **own)
    opened = open_sources(config, LanguageModel(config))
    now, before = (
        compute_fingerprint(config, LanguageModel(config), *opened, with_reading=with_reading)
        for with_reading in (True, False)
    )
    assert (now != before) is ("csv" in (train, validation))


def test_each_file_of_each_source_is_in_the_hash_of_inputs(tmp_path: Path) -> None:
    """Also of the second source, and of each's validation data."""
    sources, files = {}, []
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        files += [tmp_path / name / file for file in ("a.txt", "b.txt")]
        files.append(tmp_path / f"{name} validation.txt")
        sources[name] = {"source": str(tmp_path / name), "validation": "source", "validation_source": str(files[-1])}
    for file in files:
        file.write_text("some text")
    config = replace(settings("python"), data=DataConfig(sources=sources))
    found = [hash_inputs(config, ["web"])]
    for file in files:
        file.write_text("some more text")
        found.append(hash_inputs(config, ["web"]))
    assert None not in found
    assert len(set(found)) == len(files) + 1
    assert hash_inputs(config, []) is None


def test_a_run_goes_on_with_its_own_data_and_a_mixture_with_other_sources() -> None:
    alone = Identity("a")
    assert alone.is_compatible_with("a", {})
    assert not alone.is_compatible_with("b", {})
    assert not alone.is_compatible_with(None, {})
    mixed = Identity("m", {"code": "c", "text": "t"})
    assert mixed.is_compatible_with("other", {"code": "c", "new": "n"}), "a source has come, and one gone"
    assert not mixed.is_compatible_with("m", {"code": "changed", "text": "t"})
    assert not mixed.is_compatible_with("other", {}), "before it was one source"
    assert mixed.fingerprint_of_source("code") == "c"
    assert alone.fingerprint_of_source("") == "a"
