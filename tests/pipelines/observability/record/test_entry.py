"""An entry has its time and step and no secrets; malformed ones from senders are rejected."""

import time
from typing import Any

import pytest

from raystride.pipelines.observability.record.entry import (
    KINDS,
    TEXT_KINDS,
    check_entry,
    new_entry,
    redact_entry,
    warning_entry,
)
from raystride.pipelines.system import credentials


def test_an_entry_is_of_now_or_of_the_time_that_is_given() -> None:
    before = time.time()
    now = new_entry("metrics", {"train_loss": 1.0}, step=3)
    assert before <= now["time"] <= time.time()
    assert (now["kind"], now["step"], now["values"]) == ("metrics", 3, {"train_loss": 1.0})
    assert new_entry("metrics", {}, time=0.0)["time"] == 0.0
    assert new_entry("metrics", {})["step"] is None
    assert warning_entry("hot")["values"] == {"name": "warning", "text": "hot"}


def test_kinds_are_those_of_the_types() -> None:
    figures = {"metrics", "system", "rank", "ranks", "totals", "artifact", "summary"}
    assert TEXT_KINDS | figures == KINDS


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "guess"}, ValueError),
        ({"time": "noon"}, ValueError),
        ({"time": None}, TypeError),
        ({"values": [1.0]}, TypeError),
    ],
    ids=str,
)
def test_what_is_no_entry_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    entry: Any = new_entry("metrics", {"train_loss": 1.0}, step=1)
    check_entry(entry)
    with pytest.raises(error):
        check_entry(entry | change)
    for key in ("kind", "time", "values"):
        with pytest.raises(KeyError):
            check_entry({name: value for name, value in entry.items() if name != key})  # type: ignore[arg-type]


def test_texts_are_told_without_secrets_and_figures_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_values", {"hunter22x"})
    uri = "https://user:hunter22x@host/a"
    told: Any = redact_entry(
        new_entry("parameters", {"uri": uri, "many": [uri], "pair": (uri, 3), "steps": 5, "none": None})
    )
    masked = "https://***@host/a"
    assert told["values"] == {"uri": masked, "many": [masked], "pair": (masked, 3), "steps": 5, "none": None}
    assert redact_entry(warning_entry("hunter22x is wrong"))["values"]["text"] == "*** is wrong"  # type: ignore[typeddict-item]
    only_lists: Any = redact_entry(new_entry("parameters", {"many": [uri]}))
    assert only_lists["values"] == {"many": [masked]}
    figures = new_entry("metrics", {"train_loss": 1.0})
    assert redact_entry(figures) is figures
