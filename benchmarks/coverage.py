"""How often the 95 % intervals of `evaluate` hold the truth: 95 % is meant.

    python -m benchmarks.coverage

Proportions are counted exactly on a grid of samples and truths, means of documents' windows on drawn data sets. Beside each
stands what 0.3 had: percentiles of resampled rows.
"""

import argparse
import json

import numpy as np

from raystride.pipelines.evaluate.intervals import bootstrap, proportion_interval

SAMPLES = (10, 12, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)
TRUTHS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)
DESIGNS = ((40, 10, 0.5), (100, 5, 0.3), (30, 20, 0.2))
"""Documents, windows of each, and the share of the variance between documents."""


def coverage_of_proportions() -> dict[tuple[int, float], float]:
    """Returns the share of samples whose interval holds the truth, by number of rows and truth."""
    from scipy.stats import binom

    found = {}
    for rows in SAMPLES:
        bounds = np.array([proportion_interval(count, rows) for count in range(rows + 1)])
        for truth in TRUTHS:
            holds = (bounds[:, 0] <= truth) & (truth <= bounds[:, 1])
            found[rows, truth] = float(binom.pmf(np.arange(rows + 1), rows, truth)[holds].sum())
    return found


def coverage_of_resampled_proportions(rows: int, truth: float, data_sets: int, resamples: int) -> float:
    """Returns the share of drawn data sets whose percentiles of resampled rows hold the truth, as 0.3 had them."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(data_sets):
        right = generator.random(rows) < truth
        shares = generator.binomial(rows, right.mean(), resamples) / rows  # rows drawn with replacement
        low, high = np.quantile(shares, (0.025, 0.975))
        held += low <= truth <= high
    return held / data_sets


def coverage_of_documents(
    documents: int, windows: int, between: float, *, data_sets: int, resamples: int
) -> dict[str, float]:
    """Returns the share of drawn data sets whose interval holds the mean, 0, with documents drawn anew and with windows.

    Of the variance 1 of a window `between` is between documents.
    """
    generator, held = np.random.default_rng(0), {"documents": 0, "windows": 0}
    units = np.repeat(np.arange(documents), windows)
    for number in range(data_sets):
        values = generator.normal(0, between**0.5, documents)[units] + generator.normal(0, (1 - between) ** 0.5, len(units))
        for name, drawn in (("documents", units), ("windows", np.arange(len(units)))):

            def grade(weights: np.ndarray, values: np.ndarray = values) -> dict[str, float]:
                return {"mean": float(weights @ values / weights.sum())}

            low, high = bootstrap(grade, drawn, resamples=resamples, seed=number)["mean"]
            held[name] += low <= 0 <= high
    return {name: count / data_sets for name, count in held.items()}


def main() -> None:
    """Prints the shares, in percent; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-sets", type=int, default=400)
    arguments = parser.parse_args()
    shares = coverage_of_proportions()
    least = min(shares, key=lambda point: shares[point])
    print(f"proportions: {100 * np.mean(list(shares.values())):.1f} % on average, {100 * shares[least]:.1f} % at {least}")
    before = {point: coverage_of_resampled_proportions(*point, arguments.data_sets, 1000) for point in shares}
    worst = min(before, key=lambda point: before[point])
    print(f"  in 0.3: {100 * np.mean(list(before.values())):.1f} % on average, {100 * before[worst]:.1f} % at {worst}")
    rows = {}
    for design in DESIGNS:
        found = coverage_of_documents(*design, data_sets=arguments.data_sets, resamples=400)
        rows[str(design)] = found
        text = ", ".join(f"{name} drawn anew: {100 * share:.1f} %" for name, share in found.items())
        print(f"{design[0]} documents of {design[1]} windows, {design[2]:.0%} of the variance between them: {text}")
    print(json.dumps({"proportions": float(np.mean(list(shares.values()))), "least": shares[least], "documents": rows}))


if __name__ == "__main__":
    main()
