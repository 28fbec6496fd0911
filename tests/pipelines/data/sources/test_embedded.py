"""Built-in data sets are deterministic, and their inputs do not contain the labels."""

import ast
from base64 import b64decode
from collections import Counter
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raystride.pipelines.data.sources import embedded
from raystride.pipelines.data.sources.registry import registered_sources
from tests.pipelines.conftest import rows, settings
from tests.pipelines.data.prepare.tasks import Labelled, Pictures, made, pairs


def test_snippets_do_not_overlap_or_name_their_package() -> None:
    code = "\n".join(
        [
            "import json",
            "from json import (",
            "  loads,",
            "  dumps)",
            "x = json.loads(y)",
            "JSONDecoder()",
            "",
            "decoder = 1",
        ]
        + [f"line{number} = decoders" for number in range(30)]
    )
    found = list(embedded.snippets(code, "json", {"decoder"}))
    assert found == ["\n".join(f"line{n} = decoders" for n in range(first, first + 12)) for first in (0, 12)]


@pytest.mark.long
def test_packages_are_twenty_with_text_enough() -> None:
    found = list(embedded.packages())
    counts = Counter(each["label"] for each in found)
    assert len(counts) == 20
    assert min(counts.values()) >= 50
    assert len({each["text"] for each in found}) == len(found)
    assert not [each for each in found if each["label"] in each["text"].lower()]
    assert {each["text"].count("\n") for each in found} == {11}


@pytest.mark.long
def test_summaries_are_not_in_the_functions() -> None:
    found = list(islice(embedded.docstrings(), 150))
    for each in found:
        (function,) = ast.parse(each["text"]).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
        assert 0 < len(each["target"]) <= 120
        assert len(each["text"]) <= 1200
    assert found == list(islice(embedded.docstrings(), 150))


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    found, given = list(embedded.digits()), load_digits()
    assert [each["label"] for each in found] == [str(digit) for digit in given.target]
    for each, pixels in zip(found[:50], given.images, strict=False):
        image = Image.open(BytesIO(b64decode(each["image"].removeprefix("data:image/png;base64,"))))
        assert np.abs(np.asarray(image) / 255 * 16 - pixels).max() < 0.04


def test_a_reversal_is_the_other_words_backwards() -> None:
    found = list(embedded.reversal())
    assert len({each["text"] for each in found}) == len(found) == 20_000
    words = dict(zip(embedded._ENGLISH.split(), embedded._GERMAN.split(), strict=True))
    assert len(words) == 20
    for each in found:
        text = each["text"].split()
        assert 4 <= len(text) <= 12
        assert each["target"].split() == [words[word] for word in reversed(text)]


@pytest.mark.long
def test_they_are_sources_under_their_names(tmp_path: Path) -> None:
    assert {"packages", "docstrings", "digits", "reversal"} <= set(registered_sources())
    result = made(Labelled, settings("packages", validation_fraction=0.1), tmp_path)
    training, validation = ({tuple(row["ids"]) for row in rows(result, split)} for split in ("train", "validation"))
    assert not training & validation
    assert {label for _, label in pairs(result)} == set(embedded.PACKAGES)
    assert made(Pictures, settings("digits"), tmp_path).manifest.learned == {"labels": list("0123456789")}
