"""A run's page: complete, self-contained, with the figures of the journal; suggestions with the figures behind them."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.observability.report.advice import suggest_changes
from raystride.pipelines.observability.report.figures import gather_figures
from raystride.pipelines.observability.report.page import run_page, write_page
from raystride.pipelines.system.storage.folder import Folder

SHARES = {"data": 0.1, "forward": 0.2, "backward": 0.4, "reduce": 0.1, "update": 0.05, "validation": 0.0, "checkpoint": 0.0}
SUMMARY = {"run": "a <b> run", "status": "finished", "steps": 30, "tokens_per_second": 1234.5, "mfu": None, "val_loss": 1.25}


def _metrics(step: int, **more: float) -> dict[str, Any]:
    values = {f"phase_{name}_share": share for name, share in SHARES.items()}
    return {
        "kind": "metrics",
        "step": step,
        "time": 100.0 + step,
        "values": values | {"train_loss": 3.0 / step, "tokens_per_second": 10.0 * step} | more,
    }


def _rank(step: int, rank: int, own_s: float) -> dict[str, Any]:
    values = {"rank": rank, "own_s": own_s, "steps": 10, "seconds": 1.0}
    return {"kind": "rank", "step": step, "time": 100.0, "values": values}


def _system(time: float, watts: float) -> dict[str, Any]:
    values = {"system/gpu_0_power_usage_watts": watts, "system/gpu_0_utilization_percentage": 80.0, "system/note": "text"}
    return {"kind": "system", "step": 1, "time": time, "values": values}


ENTRIES = [
    *(_metrics(step) for step in (10, 20, 30)),
    _metrics(25, val_loss=float("nan")),
    *(_rank(step, rank, 0.5 + rank) for step in (10, 20) for rank in (0, 1)),
    *(_system(100.0 + second, 200.0 + second) for second in range(5)),
]
OPERATIONS = [{"name": f"aten::op{number}<&>", "calls": 1000, "share": 0.3} for number in range(12)]


class Reader(HTMLParser):
    """Collects tags that are open, addresses, and text."""

    VOID = ("meta", "br", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


def test_it_is_whole_and_needs_nothing_from_elsewhere() -> None:
    page = run_page(gather_figures(ENTRIES), SUMMARY, OPERATIONS)
    found = _read(page)
    assert found.counts["svg"] == 6
    assert "script" not in found.counts
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert not re.search(r"@import|url\((?!#)", page)


def test_it_says_what_the_journal_and_the_summary_say() -> None:
    text = _read(run_page(gather_figures(ENTRIES), SUMMARY, OPERATIONS)).text
    assert "a <b> run" in text
    for expected in ("1,234", "1.2500", "backward 40.0%", "rest 15.0%", "communication 10.0%", "aten::op9<&>"):
        assert expected in text
    assert "aten::op10" not in text, "ten operations are shown"
    assert "model FLOP utilisation" not in text, "what is not known is left out"


def test_a_run_with_experts_has_a_picture_of_their_loads() -> None:
    entries = [_metrics(step, **{f"expert_load/{expert}": 0.5 + expert for expert in range(3)}) for step in (10, 20)]
    found = gather_figures(entries)
    assert found.experts.items() == [(step, {0: 0.5, 1: 1.5, 2: 2.5}) for step in (10, 20)]
    page = run_page(found, SUMMARY | {"active_parameters": 12345})
    assert "Load of experts" in page
    assert "12,345" in page
    assert "Load of experts" not in run_page(gather_figures(ENTRIES), SUMMARY)


def test_what_the_journal_lacks_is_on_the_page() -> None:
    said = {"kind": "event", "step": None, "time": 0.0, "values": {"name": "damaged", "text": "segments 2 to 3 are gone"}}
    assert (
        "The journal is damaged: segments 2 to 3 are gone."
        in _read(run_page(gather_figures([*ENTRIES, said]), SUMMARY)).text
    )


def test_a_run_that_measured_nothing_has_a_page_too() -> None:
    found = _read(run_page(gather_figures([]), {"run": "empty", "status": "failed"}))
    assert "svg" not in found.counts
    assert "Not recorded: loss, speed, " in found.text


def test_a_classifier_has_its_metrics_confusion_and_answers(tmp_path: Path) -> None:
    folder = Folder.from_uri(str(tmp_path))
    documents = [
        {"text": "a <b> text", "label": "spam", "answer": "ham", "probability": 0.9},
        {"text": "less sure", "label": "spam", "answer": "ham", "probability": 0.6},
        {"text": "surely right", "label": "ham", "answer": "ham", "probability": 0.99},
    ]
    answers = {"step": 1200, "labels": ["ham", "spam"], "confusion": [[90, 2], [30, 3]], "documents": documents}
    folder.put_json("answers.json", answers)
    entries = [*ENTRIES, *(_metrics(step, val_accuracy=step / 40, val_macro_f1=0.5, val_bleu=20.0) for step in (26, 30))]
    write_page(folder, gather_figures(entries), SUMMARY)
    found = _read(folder.read("report.html").decode())
    assert found.counts["svg"] == 6 + 2 + 1, "shares in one picture, BLEU in another, and the matrix"
    for expected in ("125 validation samples at step 1,200", "spamham3090.9%", "2 of the first 3", "accuracy, macro_f1"):
        assert expected in found.text
    assert found.text.index("a <b> text") < found.text.index("less sure") < found.text.index("surely right")
    folder.put("answers.json", '{"step": 1}')
    write_page(folder, gather_figures(ENTRIES), SUMMARY)
    assert "Confusion" not in folder.read("report.html").decode()


def test_shares_are_means_over_the_intervals() -> None:
    shares = gather_figures(ENTRIES).part_shares
    assert shares["backward"] == pytest.approx(0.4)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert gather_figures([]).part_shares == {}


def test_it_is_written_with_the_operations_of_the_newest_profile(tmp_path: Path) -> None:
    folder = Folder.from_uri(str(tmp_path))
    folder.put_json("profiles/torch-rank0-steps20-25-operations.json", OPERATIONS)
    write_page(folder, gather_figures(ENTRIES), SUMMARY)
    assert "aten::op0" in folder.read("report.html").decode()


@pytest.mark.parametrize(
    ("summary", "shares", "said"),
    [
        ({}, {"data": 0.31}, "wait 31% of their time for data: raise data.prefetch"),
        ({}, {"reduce": 0.4}, "wait 40% of their time for each other's gradients"),
        ({}, {"checkpoint": 0.2}, "Checkpoint takes 20% of the time: raise checkpoint.every"),
        (
            {"straggler_loss_share": 0.12, "slowest_rank": 3, "slowest_node": "n2"},
            {},
            "lost 12% of its time to rank 3 on n2",
        ),
        ({"gpu_idle_share": 0.5}, {}, "idle in 50% of the samples"),
        ({"throttled_seconds": 7.0, "throttled_seconds_by_reason": {"sw_power_cap": 7.0}}, {}, "7 s (sw_power_cap)"),
        ({"mfu": 0.12}, {}, "utilisation is 12%"),
        ({"mfu": 0.5, "gpu_idle_share": 0.01}, {"data": 0.01, "reduce": 0.1}, "Nothing stands out"),
    ],
)
def test_advice_has_its_figure(summary: dict[str, Any], shares: dict[str, float], said: str) -> None:
    advice = suggest_changes(summary, shares)
    assert len(advice) == 1
    assert said in advice[0]


def test_time_lost_to_the_slowest_rank_is_on_the_page() -> None:
    text = run_page(gather_figures(()), SUMMARY | {"straggler_loss_share": 0.125, "slowest_rank": 3})
    assert re.search(r"lost to the slowest rank.{0,60}12\.5%", text, re.DOTALL)
    assert re.search(r"slowest rank(</[a-z]+>|<[^>]*>|\s)*3<", text)


def test_the_costliest_comes_first() -> None:
    advice = suggest_changes(
        {"straggler_loss_share": 0.1, "slowest_rank": 0, "slowest_node": "a"}, {"data": 0.3, "validation": 0.2}
    )
    assert [text.split()[0] for text in advice] == ["Steps", "Validation", "The"]
