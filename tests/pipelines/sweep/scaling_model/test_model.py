"""The scaling model finds the truth of synthetic clusters, and reports unknowns that it cannot identify."""

import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from benchmarks.scaling_model import AIM, TABLES, described, read
from raystride.pipelines.sweep.scaling_model import (
    ClusterDescription,
    NetworkLink,
    NotPredicted,
    Observation,
    Prediction,
    ScalingModel,
    TrialError,
    Work,
    hold_out,
)
from raystride.pipelines.sweep.scaling_model.fit import PRIORS
from tests.pipelines.sweep.scaling_model.synthetic import LARGE, SMALL, TRUTH, list_works, measure, seconds, step_parts
from tests.some import some

SLOW_LINKS = TRUTH | {"intra bandwidth": 6e9, "inter bandwidth": 2e9, "inter latency": 1e-3}
DESCRIBED = ClusterDescription("V100", 8, NetworkLink(50, 7), NetworkLink(18, 27), price_per_gpu_hour=2.0, peak_tflops=125)


def the_prediction(answers: list[Prediction | NotPredicted]) -> Prediction:
    """Returns the one prediction."""
    (answer,) = answers
    assert isinstance(answer, Prediction), answer
    return answer


@pytest.fixture(scope="module")
def model() -> ScalingModel:
    """Fitted to trials on up to 32 workers of a described cluster."""
    return ScalingModel.fit(measure(list_works()), DESCRIBED)


def test_identified_unknowns_are_near_the_truth() -> None:
    """Links so slow that they show: each unknown that counts as measured is within a third of the truth."""
    model = ScalingModel.fit(measure(list_works([1, 2, 4, 8, 16, 32, 64]), SLOW_LINKS, noise=0.002))
    terms = {term.name: term for term in model.terms()}
    measured = {name for name, term in terms.items() if term.source == "measured" and name != "noise"}
    assert {"inter bandwidth", "inter latency", "intra bandwidth", "compute V100 small fp32"} <= measured
    for name in measured:
        assert abs(math.log(terms[name].value.middle / SLOW_LINKS[name])) < math.log(4 / 3), terms[name]


def test_eight_times_the_largest_trial_is_predicted(model: ScalingModel) -> None:
    for work in (SMALL, LARGE):
        answer = the_prediction(model.predict(work, target_tokens=1e9, workers=[256]))
        assert answer.step_seconds.middle == pytest.approx(seconds(replace(work, workers=256, slots=256), TRUTH), rel=0.05)


@pytest.mark.long
def test_intervals_have_their_stated_coverage() -> None:
    """Sixteen clusters drawn from the priors; of two further trials on each, 80 % should lie inside."""
    rng, inside = np.random.default_rng(7), 0
    further = [replace(SMALL, workers=64, slots=64), replace(LARGE, workers=64, slots=64)]
    for seed in range(16):
        truth = {name: prior.middle * prior.factor ** rng.standard_normal() for name, prior in PRIORS.items()}
        truth["overlap"] = min(truth["overlap"], 1.0)
        truth |= {name: TRUTH[name] for name in TRUTH if name.startswith("compute")}
        trials = measure([*list_works([1, 4, 16]), *further], truth, noise=truth["noise"], seed=seed)
        model = ScalingModel.fit(trials[:-2], steps=150)
        for one in trials[-2:]:
            predicted = model.step_seconds(one.work)
            inside += predicted.low <= one.seconds <= predicted.high
    assert 20 <= inside <= 31


def test_two_numbers_of_workers_do_not_identify_latency() -> None:
    trials = measure([replace(SMALL, workers=size, slots=size, workers_per_node=1) for size in (1, 2)], SLOW_LINKS)
    terms = {term.name: term for term in ScalingModel.fit(trials).terms()}
    assert str(terms["inter latency"]) == (
        "inter latency: not identified: needs trials on 3 different numbers of nodes, these have 2, or sweep.cluster"
    )
    assert terms["slowest"].source == "not identified"


def test_a_described_link_is_no_measurement() -> None:
    terms = {term.name: term for term in ScalingModel.fit(measure(list_works([1, 2])), DESCRIBED).terms()}
    assert terms["inter latency"].source == "described"
    assert terms["inter latency"].value.low < 40e-6 < terms["inter latency"].value.high


def test_nothing_is_predicted_without_a_described_cluster() -> None:
    answers = ScalingModel.fit(measure(list_works()), steps=50).predict(SMALL, target_tokens=1e9)
    assert [answer.workers for answer in answers] == [8, 64, 512, 4096]
    assert all(isinstance(answer, NotPredicted) and "sweep.cluster" in str(answer) for answer in answers)


@pytest.mark.parametrize(
    ("work", "cluster", "reason"),
    [
        (SMALL, replace(DESCRIBED, device="H100"), "trials ran on V100, described is H100"),
        (replace(SMALL, precision="bf16"), DESCRIBED, "no trial computed like V100 small bf16"),
        (
            replace(SMALL, strategy="fsdp", workers=3, workers_per_node=3, slots=3, shard_workers=3),
            DESCRIBED,
            "shard_workers is 3",
        ),
    ],
)
def test_unmeasured_work_is_not_predicted(work: Work, cluster: ClusterDescription, reason: str) -> None:
    (answer,) = ScalingModel.fit(measure(list_works()), cluster, steps=100).predict(work, target_tokens=1e9, workers=[8])
    assert isinstance(answer, NotPredicted)
    assert reason in str(answer)


def test_an_interval_too_wide_is_no_prediction() -> None:
    """From one lone worker and a data sheet nobody knows how long ten seconds of communication really take."""
    slow = replace(DESCRIBED, inter=NetworkLink(1.0, 50))
    (answer,) = ScalingModel.fit(measure([LARGE]), slow).predict(LARGE, target_tokens=1e9, workers=[512])
    assert isinstance(answer, NotPredicted)
    assert "a step may take" in answer.reasons[0]
    assert any(reason.startswith("inter bandwidth: ") for reason in answer.reasons)


def test_gradient_wait_separates_crowding_from_communication() -> None:
    """One and two workers of one machine: both make the step longer, and only sending makes workers wait."""
    slow = TRUTH | {"intra bandwidth": 8e9, "crowding": 0.4}
    trials = measure([replace(model, workers=size, slots=size) for model in (SMALL, LARGE) for size in (1, 2)], slow)
    waits = [step_parts(one.work, slow) for one in trials]
    with_waits = [
        Observation(one.work, one.step_seconds, reduce_seconds=float((wait.exposed + wait.waiting)[0, 0]))
        for one, wait in zip(trials, waits, strict=True)
    ]
    guessed, found = (
        next(term for term in ScalingModel.fit(observations_of_both).terms() if term.name == "crowding")
        for observations_of_both in (trials, with_waits)
    )
    assert guessed.source == "not identified"
    assert found.source == "measured"
    assert found.value.middle == pytest.approx(0.4, rel=0.2)


def test_a_disturbed_trial_moves_little() -> None:
    trials = measure(list_works([1, 4, 16]))
    further = replace(SMALL, workers=64, slots=64)
    calm = ScalingModel.fit(trials, steps=400).step_seconds(further)
    trials[9] = Observation(trials[9].work, (3 * trials[9].seconds,))
    assert ScalingModel.fit(trials, steps=400).step_seconds(further).middle == pytest.approx(calm.middle, rel=0.05)


def test_cost_time_and_utilisation_follow_from_the_step(model: ScalingModel) -> None:
    work = replace(SMALL, flops_per_token=1.5e9)
    answer = the_prediction(model.predict(work, target_tokens=1e9, workers=[64]))
    steps = 1e9 / (64 * 2048)
    assert answer.nodes == 8
    assert answer.seconds.middle == pytest.approx(steps * answer.step_seconds.middle)
    assert answer.cost is not None
    assert answer.cost.middle == pytest.approx(answer.seconds.middle * 64 * 2.0 / 3600)
    assert answer.utilisation is not None
    assert answer.utilisation.middle == pytest.approx(2048 / answer.step_seconds.middle * 1.5e9 / 125e12, rel=1e-3)
    assert sum(answer.shares.values()) == pytest.approx(1, abs=0.05)
    assert answer.joules is None
    assert str(answer).startswith("64 workers: ")
    assert "costs" in str(answer)
    assert answer.limit in str(answer)


def test_energy_follows_from_computing_and_waiting() -> None:
    """Workers that draw 100 W waiting and 300 W computing, on links so slow that shares differ."""
    trials = []
    for one in measure(list_works(), SLOW_LINKS, noise=0.002):
        computing = seconds(replace(one.work, workers=1, slots=one.work.slots // one.work.workers), SLOW_LINKS)
        joules = one.work.workers * (100 * one.seconds + 200 * computing)
        trials.append(Observation(one.work, one.step_seconds, joules_per_token=joules / one.work.tokens))
    slow = replace(DESCRIBED, intra=NetworkLink(7.5, 7), inter=NetworkLink(2.5, 270))
    answer = the_prediction(ScalingModel.fit(trials, slow).predict(LARGE, target_tokens=1e9, workers=[64]))
    assert answer.joules is not None
    assert answer.shares["communication"] > 0.3
    watts = answer.joules.middle / answer.seconds.middle / 64
    assert watts == pytest.approx(100 + 200 * answer.shares["compute"], rel=0.1)


def test_trials_held_back_are_predicted() -> None:
    alone = replace(SMALL, model="alone")
    trials = [*measure(list_works([1, 4, 16])), Observation(alone, (0.2,))]
    found = hold_out(trials, steps=200)
    assert len(found.trials) == 12
    assert found.skipped == (alone,)
    assert found.median < 0.03
    assert found.max_error == max(map(abs, found.relative_errors))
    assert "12 trials held back: median error" in str(found)


def test_larger_groups_can_be_held_back() -> None:
    found = hold_out(measure(list_works()), DESCRIBED, above_workers=8)
    assert {work.workers for work, _, _ in found.trials} == {16, 32}
    assert found.median < 0.1


def test_the_same_trials_give_the_same_model() -> None:
    first, second = (ScalingModel.fit(measure(list_works([1, 2])), steps=50) for _ in range(2))
    assert all((first.draws[name] == second.draws[name]).all() for name in some(first.draws))


def test_no_trials_are_an_error() -> None:
    with pytest.raises(TrialError, match="no trials"):
        ScalingModel.fit([])


def test_llama_on_128_gpus_is_predicted_from_8_and_described_links() -> None:
    stated = yaml.safe_load(TABLES.read_text())["torchtitan, Llama 3.1 8B on H100"]
    found = hold_out(read(stated), described(stated), above_workers=8)
    assert [work.workers for work, _, _ in found.trials] == [128] * 3
    assert found.max_error < 0.05


def test_larger_groups_of_mosaic_s_table_are_predicted_from_up_to_32_gpus() -> None:
    stated = yaml.safe_load(TABLES.read_text())["llm-foundry, MPT on A100 40GB"]
    found = hold_out(read(stated), described(stated), above_workers=32)
    assert len(found.trials) == 15
    assert found.median < 0.03
    assert found.max_error < AIM
