"""The scaling model against published tables: fitted to the smaller numbers of GPUs of each, it predicts the larger ones.

The peer is what one would guess without a model: that each GPU does as many tokens a second as in the largest group that the
fit saw of the same model. Tables, with their sources, are in benchmarks/published_scaling.yaml.

Of Megatron's weak scaling no larger network is among the smaller: what a token of one costs follows there from its
operations, or from these and the bytes that it moves. Without that the model would refuse, so those rows are not in the sum.

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
from raystride.pipelines.sweep.scaling_model import (
    ClusterDescription,
    HoldOut,
    NetworkLink,
    Observation,
    ScalingModel,
    Work,
    WorkMesh,
    hold_out,
)

TABLES = Path(__file__).with_name("published_scaling.yaml")
EFFORT = 1e10
"""Operations of a token that count as one, where models of several sizes compute at one speed."""
AIM = 0.10
"""Of the median error on trials that were held back."""


def read(stated: Mapping[str, Any]) -> list[Observation]:
    """The rows of a table as trials."""
    common = dict(stated["work"])
    tokens_per_sample = common.pop("tokens_per_sample")
    trials = []
    for row in stated["rows"]:
        model, workers, tokens = dict(stated["models"][row["model"]]), row["workers"], row["samples"] * tokens_per_sample
        if "layers" in model:
            model = of_mesh(model, stated, tokens_per_sample) | {"model": stated.get("speed", row["model"])}
            groups = workers // model["mesh"].group_workers
            row = row | {"micro_batches": row["batch"] // row["samples"] // groups}
        else:
            groups = workers
        work = Work(
            **common | {"device": stated["device"], "model": row["model"]} | model,
            workers=workers,
            slots=groups * row["micro_batches"],
            tokens_per_slot=tokens,
            recompute=row.get("recompute", False),
            reshard=row.get("reshard", True),
        )
        by_second = {
            "tokens a second and GPU": work.tokens / (row["rate"] * workers),
            "samples a second": row["samples"] * work.slots / row["rate"],
            "teraFLOP/s a GPU": work.tokens * (work.flops_per_token or 0.0) / (row["rate"] * 1e12 * workers),
        }
        trials.append(Observation(work, (by_second[stated["published"]],)))
    return trials


def of_mesh(model: Mapping[str, Any], stated: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Parameters, operations and mesh of a GPT whose activations are computed twice: Narayanan et al., 2021, (2), (3)."""
    shape, words = dict(model), stated["words"]
    layers, width, heads = shape["layers"], shape["width"], shape.pop("heads")
    operations = 96 * layers * width**2 * (1 + tokens / (6 * width) + words / (16 * layers * width))
    half = {"stream_bytes": 2, "product_bytes": 2, "gradient_bytes": 2}
    mesh = WorkMesh(
        **shape | half,
        schedule="interleaved" if "stages_per_worker" in shape else "1f1b",
        words=words,
        head_blocks=words / (16 * width + 16 * tokens / 6),
    )
    parameters = 12 * layers * width**2 * (1 + 13 / (12 * width) + (words + tokens) / (12 * layers * width))
    effort = operations / EFFORT
    if roof := stated.get("roofline"):
        # What a forward keeps (Korthikanti et al., 2022, (1)) is written and read by two forwards, read by the backward, and
        # so are the gradients of it.
        moved = 7 * layers * (34 * width + 5 * heads * tokens)
        effort += moved / roof["terabytes"] * roof["teraflops"] / EFFORT
    return {"parameters": round(parameters), "flops_per_token": operations, "effort": effort, "mesh": mesh}


def described(stated: Mapping[str, Any]) -> ClusterDescription | None:
    """The links that a source states."""
    found = stated.get("cluster")
    if found is None:
        return None
    return ClusterDescription(
        stated["device"], found["gpus_per_node"], NetworkLink(**found["intra"]), NetworkLink(**found["inter"])
    )


def guess(trials: Sequence[Observation], work: Work, up_to: int) -> float:
    """Seconds of a step if each worker does as many tokens a second as in the largest group up to a size.

    Of models that compute at one speed: as many operations.
    """
    alike = [one for one in trials if one.work.group == work.group and one.work.workers <= up_to]
    largest = max(alike, key=lambda one: one.work.workers)
    done = largest.work.tokens_per_worker * largest.work.effort
    return work.tokens_per_worker * work.effort * largest.seconds / done


def show(found: HoldOut, guesses: Sequence[float], model: ScalingModel) -> None:
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
        found = hold_out(trials, cluster, above_workers=up_to)
        guesses = [guess(trials, work, up_to) for work, _, _ in found.trials]
        missed = [abs(guessed / measured - 1) for guessed, (_, _, measured) in zip(guesses, found.trials, strict=True)]
        print(f"\n{name}, {stated['date']} ({stated['source']})")
        print(f"  fitted up to {up_to} GPUs{', with its links described' if cluster else ''}: {found}")
        print(f"  guessed: {spread(missed)}")
        if given.each:
            show(found, guesses, ScalingModel.fit([one for one in trials if one.work.workers <= up_to], cluster))
        if "speed" not in stated:  # else of networks that no trial ran, which the model would refuse to predict
            errors += map(abs, found.relative_errors)
            guess_errors += missed
        table = {"table": name, "trials": len(found.trials), "inside": found.coverage}
        figures.append(table | {"median": found.median, "worst": found.max_error, "guess": statistics.median(missed)})
    print(f"\nall {len(errors)} trials of networks that the fit saw: {spread(errors)} (aim: median at most {AIM:.0%})")
    print(f"guessed: {spread(guess_errors)}")
    if given.json:
        given.json.write_text(json.dumps({"machine": ran_on, "figures": figures}, indent=1) + "\n")


def spread(errors: Sequence[float]) -> str:
    """Sizes of errors in words."""
    return f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"


if __name__ == "__main__":
    main()
