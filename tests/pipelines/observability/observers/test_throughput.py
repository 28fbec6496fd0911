"""Rates, pauses left out, MFU only where the peak is known."""

from typing import Any

import pytest

from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.observers.throughput import (
    MAX_KEPT_STEPS,
    PEAKS,
    Throughput,
    peak_flops,
    peak_memory_bytes,
)
from tests.some import some


def facts(**changes: Any) -> RunFacts:
    """Facts of a run with 1000 tokens a step."""
    given: dict[str, Any] = {"run": "r", "attempt": "a1", "tokens_per_step": 1000} | changes
    return RunFacts(**given)


class Clock:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_that_of_training_without_pauses() -> None:
    clock = Clock()
    observer = Throughput(clock)
    measured: dict[str, float] = {}
    observer.on_start(facts())
    for step in range(1, 12):
        clock.now += 0.5 if step % 2 else 0.25
        if step == 5:
            clock.now += 64
            observer.on_pause(64)
        observer.on_step(step)
    observer.on_log(11, measured)
    assert measured["step_seconds_mean"] == 0.375  # five of each: the first step only starts the clock
    assert measured["tokens_per_second"] == pytest.approx(1000 / 0.375)
    assert (measured["step_seconds_p50"], measured["step_seconds_p95"]) == (0.375, 0.5)
    assert "mfu" not in measured
    assert 2**25 < measured["peak_memory_bytes"] <= peak_memory_bytes()


def test_intervals_are_separate_and_the_summary_covers_all() -> None:
    clock = Clock()
    observer = Throughput(clock)
    observer.on_start(facts())
    logs: list[dict[str, float]] = [{}, {}, {}]
    for measured, seconds in zip(logs, (0.25, 0.75, None), strict=True):
        for step in range(6 if seconds else 0):
            clock.now += seconds or 0
            observer.on_step(step)
        observer.on_log(0, measured)
    assert [each.get("step_seconds_p50") for each in logs] == [0.25, 0.75, None]
    assert "tokens_per_second" not in logs[2]  # a validation's log right after that of its step has no steps of its own
    summary: dict[str, Any] = {}
    observer.on_end(summary)
    assert summary["tokens_per_second"] == pytest.approx(11 * 1000 / (5 * 0.25 + 6 * 0.75))


def test_the_first_step_starts_the_clock_and_counts_nothing() -> None:
    observer = Throughput()
    measured: dict[str, float] = {}
    observer.on_start(facts())
    observer.on_step(1)
    observer.on_log(1, measured)
    assert list(measured) == ["peak_memory_bytes"]


def test_mfu_is_the_share_of_the_peak_of_all_workers() -> None:
    clock = Clock()
    observer = Throughput(clock)
    measured: dict[str, float] = {}
    observer.on_start(facts(device="NVIDIA H100 80GB HBM3", precision="bf16", world=4, flops_per_token=1e9))
    for step in range(4):
        clock.now += 0.5
        observer.on_step(step)
    observer.on_log(3, measured)
    assert measured["tokens_per_second"] == 2000
    assert measured["mfu"] == pytest.approx(2000 * 1e9 / (4 * 989.4e12))


def test_a_long_run_keeps_a_bounded_choice_of_steps() -> None:
    observer = Throughput()
    for step in range(MAX_KEPT_STEPS + 5000):
        observer.on_step(step)
    assert len(observer._reservoir) == MAX_KEPT_STEPS


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362.05e12),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("NVIDIA A1000", "bf16", None),
        ("NVIDIA GeForce GTX 1080", "bf16", None),
        ("cpu", "fp32", None),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
    ],
)
def test_peaks_are_those_of_the_data_sheet_and_else_unknown(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak


def test_every_peak_is_dense_and_cited() -> None:
    for name, peak in PEAKS.items():
        assert len(peak.source) > 10, name
        rates = [peak.flops[precision] for precision in ("fp32", "tf32", "bf16") if precision in peak.flops]
        assert rates == sorted(rates), name
        assert all(1e12 < rate < 3e15 for rate in some(rates)), name
        if {"tf32", "bf16"} <= set(peak.flops):
            assert peak.flops["bf16"] / peak.flops["tf32"] == pytest.approx(2, rel=0.02), name
