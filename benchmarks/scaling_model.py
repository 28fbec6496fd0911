"""The scaling model against published tables: fitted to the smaller numbers of GPUs of each, it predicts the larger ones.

The peer is what one would guess without a model: that each GPU does as many tokens a second as in the largest group that the
fit saw of the same model. Tables, with their sources, are in benchmarks/published_scaling.yaml.

    python -m benchmarks.scaling_model                        # ten seconds
    python -m benchmarks.scaling_model --each                 # every prediction, and every unknown
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pairs import command_line, machine, machine_line
from raystride.pipelines.scaling_model import (
    ClusterDescription,
    HeldBack,
    NetworkLink,
    Observation,
    ScalingModel,
    Work,
    held_back,
)

TABLES = Path(__file__).with_name("published_scaling.yaml")
AIM = 0.10
"""Of the median error on trials that were held back."""


def read(stated: Mapping[str, Any]) -> list[Observation]:
    """The rows of a table as trials."""
    common = dict(stated["work"])
    tokens_per_sample = common.pop("tokens_per_sample")
    trials = []
    for row in stated["rows"]:
        workers, tokens = row["workers"], row["samples"] * tokens_per_sample
        work = Work(
            **common | {"device": stated["device"], "model": row["model"]} | stated["models"][row["model"]],
            workers=workers,
            slots=workers * row["micro_batches"],
            tokens_per_slot=tokens,
            recompute=row.get("recompute", False),
            reshard=row.get("reshard", True),
        )
        by_second = {
            "tokens a second and GPU": work.tokens / (row["rate"] * workers),
            "samples a second": row["samples"] * work.slots / row["rate"],
        }
        trials.append(Observation(work, (by_second[stated["published"]],)))
    return trials


def described(stated: Mapping[str, Any]) -> ClusterDescription | None:
    """The links that a source states."""
    found = stated.get("cluster")
    if found is None:
        return None
    return ClusterDescription(
        stated["device"], found["gpus_per_node"], NetworkLink(**found["intra"]), NetworkLink(**found["inter"])
    )


def guess(trials: Sequence[Observation], work: Work, up_to: int) -> float:
    """Seconds of a step if each worker does as many tokens a second as in the largest group up to a size."""
    alike = [one for one in trials if one.work.group == work.group and one.work.workers <= up_to]
    largest = max(alike, key=lambda one: one.work.workers)
    return work.tokens_per_worker * largest.seconds / largest.work.tokens_per_worker


def show(found: HeldBack, guesses: Sequence[float], model: ScalingModel) -> None:
    """Every prediction, then every unknown."""
    print(
        f"  {'model':<22}{'GPUs':>5}  {'published':>10}  {'predicted':>10}  {'80 % interval':<22}{'error':>7}  {'guess':>7}"
    )
    for (work, predicted, measured), guessed in zip(found.trials, guesses, strict=True):
        bounds = f"{predicted.low:.3f} to {predicted.high:.3f}"
        print(
            f"  {work.group.removeprefix(work.device).strip():<22}{work.workers:>5}  {measured:>8.3f} s  "
            f"{predicted.middle:>8.3f} s  {bounds:<22}"
            f"{predicted.middle / measured - 1:>+7.1%}  {guessed / measured - 1:>+7.1%}"
        )
    for term in model.terms():
        print(f"  {term}")


def main() -> None:
    """Parses the command line, prints how far off each table is."""
    parser = command_line("scaling_model", __doc__)
    parser.add_argument("--each", action="store_true", help="print every prediction and every unknown")
    given = parser.parse_args()
    ran_on = machine()
    print(machine_line(ran_on, ["numpy"]))
    figures: list[dict[str, Any]] = []
    errors: list[float] = []
    guess_errors: list[float] = []
    for name, stated in yaml.safe_load(TABLES.read_text()).items():
        trials, cluster, up_to = read(stated), described(stated), stated["fit_up_to"]
        found = held_back(trials, cluster, above_workers=up_to)
        guesses = [guess(trials, work, up_to) for work, _, _ in found.trials]
        missed = [abs(guessed / measured - 1) for guessed, (_, _, measured) in zip(guesses, found.trials, strict=True)]
        print(f"\n{name}, {stated['date']} ({stated['source']})")
        print(f"  fitted up to {up_to} GPUs{', with its links described' if cluster else ''}: {found}")
        print(f"  guessed: {spread(missed)}")
        if given.each:
            show(found, guesses, ScalingModel.fit([one for one in trials if one.work.workers <= up_to], cluster))
        errors += map(abs, found.errors)
        guess_errors += missed
        table = {"table": name, "trials": len(found.trials), "inside": found.inside}
        figures.append(table | {"median": found.median, "worst": found.worst, "guess": statistics.median(missed)})
    print(f"\nall {len(errors)} trials: {spread(errors)} (aim: median at most {AIM:.0%})\nguessed: {spread(guess_errors)}")
    if given.json:
        given.json.write_text(json.dumps({"machine": ran_on, "figures": figures}, indent=1) + "\n")


def spread(errors: Sequence[float]) -> str:
    """Sizes of errors in words."""
    return f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"


if __name__ == "__main__":
    main()
