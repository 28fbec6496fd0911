"""Tells whether each unknown is measured by the trials, taken from a described cluster, or not identified, and why.

An unknown counts as measured if trials have at least halved the width of its prior in orders of magnitude, to less than a
factor of four between its bounds, and if they could: terms that grow with the number of workers (hops, the slowest) need
three numbers of workers, as two points lie on a logarithm as well as on a line.

    for term in identify_unknowns(observations, draws, cluster):
        print(term)                     # inter latency: not identified: 2 numbers of nodes, of 3 needed, ...
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.scaling_model.fit import Prior, build_priors
from raystride.pipelines.scaling_model.interval import COVERAGE, Interval
from raystride.pipelines.scaling_model.observation import Observation
from raystride.pipelines.scaling_model.terms import Array

MAX_MEASURED_FACTOR = 4.0
"""Bounds further apart than this factor are no measurement."""
MAX_WIDTH_RATIO = 0.5
"""Trials measure an unknown if its width, in orders of magnitude, falls to this share of the prior's."""
REMEDIES = {
    "fixed": "needs trials with different work a step (slots, slot size)",
    "micro-batch": "needs trials with different numbers of micro-batches a worker",
    "overlap": "needs trials whose communication is sometimes hidden and sometimes not, or the measured wait for gradients",
    "slowest": "needs longer trials on more workers",
    "crowding": "needs trials with different numbers of workers on a node",
    "noise": "needs more trials",
}


@dataclass(frozen=True)
class Term:
    """An unknown, and the source of its value."""

    name: str
    value: Interval
    unit: str
    source: Literal["measured", "described", "not identified"]
    remedy: str = ""
    """Advice that would identify it; empty if it is."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.value.text()} {self.unit}"
        return f"{text}, {self.source}" if not self.remedy else f"{self.name}: not identified: {self.remedy}"


def identify_unknowns(
    observations: Sequence[Observation], draws: Mapping[str, Array], cluster: ClusterDescription | None
) -> list[Term]:
    """Returns every unknown of a fit, with its interval and its source: trials, the described cluster, or none so far."""
    prior_by_name, counts_by_unknown = build_priors(cluster), _count_settings(observations)
    terms = []
    for name, unknown in draws.items():
        value, prior = Interval.from_draws(unknown), prior_by_name.get(name)
        if prior is None:
            terms.append(Term(name, value, "s a token", "measured"))
            continue
        is_narrow = (
            math.log(value.factor) < MAX_WIDTH_RATIO * math.log(_prior_factor(prior)) and value.factor < MAX_MEASURED_FACTOR
        )
        quantity, num_seen, num_needed = counts_by_unknown.get(name, ("", 1, 1))
        is_link = name.startswith(("intra", "inter"))
        if num_seen >= num_needed and is_narrow:
            terms.append(Term(name, value, prior.unit, "measured"))
        elif cluster is not None and is_link:
            terms.append(Term(name, value, prior.unit, "described"))
        else:
            too_few = (
                f"needs trials on {num_needed} different {quantity}, these have {num_seen}" if num_seen < num_needed else ""
            )
            remedy = too_few or REMEDIES.get(name, "what crosses these links takes too little of a step to tell")
            terms.append(Term(name, value, prior.unit, "not identified", remedy + ", or sweep.cluster" * is_link))
    return terms


def _count_settings(observations: Sequence[Observation]) -> dict[str, tuple[str, int, int]]:
    """Returns, by unknown, the quantity that it depends on in words, and its numbers of values in the trials and needed."""
    works = [one.work for one in observations]
    local = len({work.local_workers for work in works})
    nodes = len({work.nodes for work in works})
    return {
        "intra bandwidth": ("numbers of workers on a node", local, 2),
        "intra latency": ("numbers of workers on a node", local, 3),
        "inter bandwidth": ("numbers of nodes", nodes, 2),
        "inter latency": ("numbers of nodes", nodes, 3),
        "slowest": ("numbers of workers", len({work.workers for work in works}), 3),
        "crowding": ("numbers of workers on a node", local, 2),
    }


def _prior_factor(prior: Prior) -> float:
    """Returns the ratio of a prior's high to its low bound."""
    normal = NormalDist(math.log(prior.middle), math.log(prior.factor))
    total = normal.cdf(math.log(prior.upper_bound)) if prior.upper_bound < math.inf else 1.0
    low, high = (normal.inv_cdf(total * share) for share in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    return math.exp(high - low)
