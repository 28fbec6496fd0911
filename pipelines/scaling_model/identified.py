"""Which unknowns the trials tell, which come from a described cluster, and what is missing for the others.

An unknown counts as told where trials have at least halved what was believed of its order of magnitude, to less than a
factor of four between its bounds, and where they could: what grows with the number of workers (hops, the slowest) needs
three numbers of workers, for two points lie on a logarithm as well as on a line.

    for term in identify(observations, draws, cluster):
        print(term)                     # inter latency: not identified: 2 numbers of nodes, of 3 needed, ...
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from raystride.pipelines.scaling_model.described import ClusterDescription
from raystride.pipelines.scaling_model.fit import Prior, priors
from raystride.pipelines.scaling_model.interval import COVERED, Interval
from raystride.pipelines.scaling_model.observation import Observation
from raystride.pipelines.scaling_model.sampling import Array

KNOWN_TO = 4.0
"""Bounds further apart than this factor are no measurement."""
NARROWED = 0.5
"""The share of its former width, in orders of magnitude, to which trials narrow what they measure."""
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
    """An unknown, and where its value comes from."""

    name: str
    value: Interval
    unit: str
    source: Literal["measured", "described", "not identified"]
    remedy: str = ""
    """What would identify it; empty where it is."""

    def __str__(self) -> str:
        found = f"{self.name}: {self.value.text()} {self.unit}"
        return f"{found}, {self.source}" if not self.remedy else f"{self.name}: not identified: {self.remedy}"


def identify(
    observations: Sequence[Observation], draws: Mapping[str, Array], cluster: ClusterDescription | None
) -> list[Term]:
    """Every unknown of a fit, with its interval and what tells it: trials, the described cluster, or nothing so far."""
    believed, counts = priors(cluster), _counts(observations)
    terms = []
    for name, found in draws.items():
        value, prior = Interval.of(found), believed.get(name)
        if prior is None:
            terms.append(Term(name, value, "s a token", "measured"))
            continue
        narrowed = math.log(value.factor) < NARROWED * math.log(_prior_factor(prior)) and value.factor < KNOWN_TO
        what, seen, needed = counts.get(name, ("", 1, 1))
        is_link = name.startswith(("intra", "inter"))
        if seen >= needed and narrowed:
            terms.append(Term(name, value, prior.unit, "measured"))
        elif cluster is not None and is_link:
            terms.append(Term(name, value, prior.unit, "described"))
        else:
            few = f"needs trials on {needed} different {what}, these have {seen}" if seen < needed else ""
            remedy = few or REMEDIES.get(name, "what crosses these links takes too little of a step to tell")
            terms.append(Term(name, value, prior.unit, "not identified", remedy + ", or sweep.cluster" * is_link))
    return terms


def _counts(observations: Sequence[Observation]) -> dict[str, tuple[str, int, int]]:
    """What an unknown depends on: in words, how many different values the trials have, and how many it takes."""
    works = [one.work for one in observations]
    local = len({work.neighbours for work in works})
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
    """How many times the low bound the high one is, of what is believed before."""
    normal = NormalDist(math.log(prior.middle), math.log(prior.factor))
    below = normal.cdf(math.log(prior.most)) if prior.most < math.inf else 1.0
    low, high = (normal.inv_cdf(below * share) for share in ((1 - COVERED) / 2, (1 + COVERED) / 2))
    return math.exp(high - low)
