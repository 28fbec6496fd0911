"""Ranges around the phases of a step: what they count, who may listen, and what they cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep

import pytest

from raystride.pipelines.config import Train, Validation
from raystride.pipelines.observers.throughput import PhaseShares
from raystride.pipelines.phases import PARTS, PHASES, listen, phase
from tests.processes import make_job
from tests.receipts import accept
from tests.tiny import tiny, write_text


def test_a_range_counts_the_hosts_time_even_when_it_raises() -> None:
    def body() -> None:
        with phase("reduce"):
            assert phase("reduce").began > 0
            sleep(0.01)
            raise ArithmeticError

    before = phase("reduce").seconds
    with pytest.raises(ArithmeticError):
        body()
    assert 0.01 <= phase("reduce").seconds - before < 60
    assert phase("reduce").began == 0


def test_a_listener_hears_ranges_nested_as_they_are() -> None:
    heard: list[str] = []

    @contextmanager
    def tell(name: str) -> Iterator[None]:
        heard.append(f"<{name}")
        yield
        heard.append(f"{name}>")

    listen(tell)
    with phase("slot"), phase("forward"):
        listen(None)  # in the middle: what is open still ends properly
    with phase("update"):
        pass
    assert heard == ["<slot", "<forward", "forward>", "slot>"]


def test_an_unknown_phase_is_no_phase() -> None:
    with pytest.raises(KeyError):
        phase("lunch")


def test_a_range_costs_about_half_a_microsecond() -> None:
    def seconds(count: int = 2_000) -> float:
        began = perf_counter()
        for _ in range(count):
            with phase("forward"):
                pass
        return (perf_counter() - began) / count

    cost = min(seconds() for _ in range(50))
    # A step passes 4 and 3 more for each micro-batch: 7 µs of 10 ms would be 0.07 %. Measured: 0.5 to 0.7 µs.
    assert cost < 2e-6, f"{cost * 1e6:.2f} µs"


def test_shares_are_those_of_the_interval() -> None:
    observer = PhaseShares()
    with phase("data"):
        sleep(0.02)  # before the start: does not count
    observer.on_start(None)  # type: ignore[arg-type]
    with phase("forward"):
        sleep(0.03)
    sleep(0.03)
    observer.on_step(1)
    measured: dict[str, float] = {}
    observer.on_log(1, measured)
    assert measured["phase_forward_share"] == pytest.approx(0.5, abs=0.1)
    assert measured["phase_data_share"] == 0
    nothing: dict[str, float] = {}
    observer.on_log(1, nothing)  # of a validation, without steps of its own
    assert not nothing


def test_a_training_passes_every_phase(tmp_path: Path) -> None:
    before = {name: phase(name).seconds for name in PHASES}
    config = tiny(
        write_text(tmp_path), train=Train(steps=2, slots=2, slot_size=1), validation=Validation(every=1, samples=2)
    )
    began = perf_counter()
    _train_here(config, tmp_path)
    elapsed = perf_counter() - began
    spent = {name: phase(name).seconds - before[name] for name in PHASES}
    assert all(seconds > 0 for seconds in spent.values()), spent
    assert spent["forward"] + spent["backward"] < spent["slot"] < spent["step"]
    assert sum(spent[name] for name in PARTS) < elapsed


def _train_here(config: object, storage: Path) -> None:
    from raystride.pipelines.worker.job import WorkerInfo
    from raystride.pipelines.worker.worker import run_worker

    job = make_job(config, storage, "mine")  # type: ignore[arg-type]
    run_worker(job, WorkerInfo(), accept, lambda: False)
