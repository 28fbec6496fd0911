"""Proves from the manifests of a run's checkpoints alone that every sample was used exactly once an epoch.

Every manifest names its parent, the range of positions since then, the order of samples, and for each rank a digest of the
(epoch, sample) pairs that this rank fed. A digest is a sum, so it depends neither on the order nor on the number of ranks:
the ranks' sum must be that of the order over the range, and the order's sum over an epoch that of all samples once. So what
was fed is compared, not what was planned; a lost, repeated or exchanged sample is found but for a chance of 2^-64.

    python -m raystride.pipelines.record.audit my-run --storage runs
    # my-run: 6,000 samples in 500 steps, 2.9 epochs of 2,048; each exactly once an epoch, none lost or repeated ...

Exit codes: 0 proven, 1 the chain breaks (the line says where), 2 there is no such run.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raystride.pipelines.feed.growth import GrownOrder
from raystride.pipelines.feed.mixture import SHIFT, Mixture, split_samples
from raystride.pipelines.feed.order import Order, digest
from raystride.pipelines.files import Folder
from raystride.pipelines.train.names import MANIFEST, checkpoint_names, step_name

CHUNK = 1 << 20
"""Positions at a time: 8 MiB of numbers."""
AnyOrder = Order | GrownOrder | Mixture
Epochs = dict[tuple[int, int], int]
"""The digest of what was planned, by a source's number and its epoch."""


class Broken(Exception):
    """The manifests do not prove it; the message says where and why.

    `step` is that of the manifest that does not fit (None: none could be read, or the order itself is wrong), `parent_step`
    that of the one before, where they do not fit each other, and `positions` the first and last that were not fed once each.
    """

    def __init__(
        self,
        message: str = "",
        *,
        step: int | None = None,
        parent_step: int | None = None,
        positions: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.step, self.parent_step, self.positions = step, parent_step, positions


@dataclass(frozen=True)
class Audit:
    """What an audit has proven: how many samples of how many steps were each used once an epoch."""

    steps: int
    samples: int
    """Samples fed, over all epochs."""
    in_an_epoch: int
    """Samples of an epoch, of all sources together."""
    checkpoints: int
    """Links of the chain, from the newest checkpoint back to the start."""
    attempts: int
    """Starts of the run that wrote one of them."""
    workers: tuple[int, ...]
    """Numbers of workers that it ran on, in the order in which they came first."""
    dropped: tuple[int, ...] = ()
    """Numbers of the steps that were fed and changed nothing, because the guard found them bad."""
    left_out: int = 0
    """Samples that the guard left out: not fed, and counted in `samples`."""
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of a mixture, the samples fed of each source, and those of its epoch."""

    def __str__(self) -> str:
        workers = ", ".join(map(str, self.workers))
        exceptions = f"; {self.left_out:,} sample(s) were left out by the guard" if self.left_out else ""
        if self.dropped:
            exceptions += f"; {len(self.dropped)} step(s) changed nothing by the guard ({_some(self.dropped)})"
        names = [name for name in self.by_source if name]
        each = ", ".join(f"{name} {self.by_source[name][0] / self.by_source[name][1]:.3g}" for name in names)
        exceptions += f"; epochs by source: {each}" if each else ""
        return (
            f"{self.samples:,} samples in {self.steps:,} steps, {self.samples / self.in_an_epoch:.3g} epochs of "
            f"{self.in_an_epoch:,}; each exactly once an epoch, none lost or repeated{exceptions} "
            f"({self.checkpoints} checkpoints of {self.attempts} attempt(s) on {workers} worker(s))"
        )


def audit(checkpoints: Folder) -> Audit:
    """Walks the chain from the newest manifest to the start. Raises Broken."""
    chain = list(reversed(list(_chain(checkpoints))))
    newest, order = chain[-1], _order(chain[-1]["order"])
    epochs: Epochs = defaultdict(int)
    for manifest in chain:
        if isinstance(order, Order) and _order(manifest["order"]) != order:
            message = f"{step_name(manifest['step'])} has the samples in another order than {step_name(newest['step'])}"
            raise Broken(message, step=manifest["step"])
        first, end = manifest["positions"]
        # Sums modulo 2^64: neither the order nor the number of workers changes them.
        fed = sum(int(each, 16) for each in manifest["fed"].values()) % 2**64
        # What the guard left out was planned but not fed; it counts for the epoch all the same.
        missing = sum(_digest(order, *place, defaultdict(int)) for place in _left_out(manifest))
        if (fed + missing) % 2**64 != _digest(order, first, end, epochs):
            raise Broken(
                f"{step_name(manifest['step'])}: its {len(manifest['fed'])} worker(s) did not feed the samples at positions "
                f"{first:,} to {end - 1:,} once each",
                step=manifest["step"],
                positions=(first, end - 1),
            )
    by_source = _check_epochs(order, newest["positions"][1], epochs)
    return Audit(
        steps=newest["step"],
        samples=newest["positions"][1],
        in_an_epoch=sum(samples for _, samples in by_source.values()),
        by_source=by_source,
        checkpoints=len(chain),
        attempts=len({manifest["attempt"] for manifest in chain}),
        workers=tuple(dict.fromkeys(manifest["world"] for manifest in chain)),
        dropped=tuple(newest.get("state", {}).get("dropped", ())),
        left_out=sum(end - first for manifest in chain for first, end in _left_out(manifest)),
    )


def _order(content: dict[str, Any]) -> AnyOrder:
    if "sources" in content:
        return Mixture.from_json(content)
    return GrownOrder.from_json(content) if "generations" in content else Order(**content)


def _check_epochs(order: AnyOrder, end: int, epochs: Epochs) -> dict[str, tuple[int, int]]:
    """By source ("" where there is one), how many samples were fed before position `end`, and how many an epoch has.

    Raises Broken where a whole epoch does not have each once.
    """
    sources: list[tuple[str, Order | GrownOrder]]
    if isinstance(order, Mixture):
        counts, sources = order.counts(end).tolist(), [(each.name, each.order) for each in order.sources]
    else:
        counts, sources = [end], [("", order)]
    for number, ((name, own), count) in enumerate(zip(sources, counts, strict=True)):
        for epoch in range(count // own.samples):
            if epochs[number, epoch] != _all_once(own.samples, epoch, number):
                of = f" of {name}" if name else ""
                raise Broken(f"the order of epoch {epoch}{of} does not visit each of {own.samples:,} samples once")
    return {name: (count, own.samples) for (name, own), count in zip(sources, counts, strict=True)}


def _left_out(manifest: dict[str, Any]) -> list[tuple[int, int]]:
    """Positions (first, behind the last) that the guard left out since the manifest's parent."""
    first, end = manifest["positions"]
    slots = manifest.get("state", {}).get("left_out", ())
    return [(position, position + samples) for _, _, position, samples in slots if first <= position < end]


def _some(steps: tuple[int, ...]) -> str:
    """Steps as people count them, the first few."""
    return ", ".join(str(step + 1) for step in steps[:8]) + (", ..." if len(steps) > 8 else "")


def _chain(checkpoints: Folder) -> Iterator[dict[str, Any]]:
    """The manifests from the newest that can be read to the start."""
    names = reversed(checkpoint_names(checkpoints.names()))
    manifest = next(filter(None, (_read(checkpoints, name) for name in names)), None)
    if manifest is None:
        raise Broken("there is no manifest of a checkpoint that could be read")
    while True:
        yield manifest
        step, parent_step, first = manifest["step"], manifest["parent_step"], manifest["positions"][0]
        if parent_step == 0 and first == 0:
            return
        parent = _read(checkpoints, step_name(parent_step)) if parent_step < step else None
        if parent is None:
            message = f"{step_name(step)} follows {step_name(parent_step)}, of which there is no manifest"
            raise Broken(message, step=step, parent_step=parent_step)
        if parent["positions"][1] != first:
            end = parent["positions"][1]
            message = f"{step_name(step)} begins at position {first:,}, but {step_name(parent_step)} ends before {end:,}"
            raise Broken(message, step=step, parent_step=parent_step)
        manifest = parent


def _read(checkpoints: Folder, name: str) -> dict[str, Any] | None:
    """A manifest that has all that an audit needs, else None."""
    try:
        manifest = dict(checkpoints.read_json(f"{name}/{MANIFEST}"))
    except (OSError, ValueError):
        return None
    return manifest if {"step", "parent_step", "positions", "fed", "order", "world", "attempt"} <= manifest.keys() else None


def _digest(order: AnyOrder, first: int, end: int, epochs: Epochs) -> int:
    """The digest of what stands at these positions, added to that of each source's epoch as well."""
    total = 0
    for start in range(first, end, CHUNK):
        positions = np.arange(start, min(end, start + CHUNK), dtype=np.int64)
        samples, there = order.at(positions), order.epochs(positions)
        sources = split_samples(samples)[0]
        for source, epoch in np.unique(np.stack((sources, there)), axis=1).T.tolist():
            here = (sources == source) & (there == epoch)
            part = digest(np.array(epoch), samples[here])
            epochs[source, epoch] = (epochs[source, epoch] + part) % 2**64
            total = (total + part) % 2**64
    return total


def _all_once(samples: int, epoch: int, source: int) -> int:
    """The digest of samples 0, 1, 2, ... of a source's epoch, in no order at all."""
    first, starts = source << SHIFT, range(0, samples, CHUNK)
    found = (digest(np.array(epoch), np.arange(start, min(samples, start + CHUNK)) + first) for start in starts)
    return sum(found) % 2**64


def main(arguments: list[str] | None = None) -> int:
    """Audits a run and prints one line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raystride.pipelines.record.audit",
        description="Proves that a run used every sample exactly once an epoch.",
    )
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--storage", default="runs", help="folder or URI that the run lies in (default: runs)")
    given = parser.parse_args(arguments)
    checkpoints = Folder.at(given.storage) / given.run / "checkpoints"
    if not checkpoints.exists():
        print(f"{given.run}: there are no checkpoints at {checkpoints}. Is --storage right?", file=sys.stderr)
        return 2
    try:
        print(f"{given.run}: {audit(checkpoints)}")
    except Broken as reason:
        print(f"{given.run}: not proven: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
