"""Proves from the manifests of a run's checkpoints alone that every sample was used exactly once an epoch.

Every manifest names its parent, the range of positions since then, the order of samples, and for each rank a digest of the
(epoch, sample) pairs that this rank fed. A digest is a sum, so it depends neither on the order nor on the number of ranks:
the ranks' sum must equal that of the order over the range, and the order's sum over an epoch that of all samples once. The
audit compares the samples that were fed, not those that were planned. A lost, repeated or exchanged sample goes unnoticed
with a probability of 2^-64.

    python -m raystride.pipelines.train.checkpoint.audit my-run --storage runs
    # my-run: 6,000 samples in 500 steps, 2.9 epochs of 2,048; each exactly once an epoch, none lost or repeated ...

Exit codes: 0 proven, 1 the chain breaks (the line names the place), 2 there is no such run.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from raystride.pipelines.data.feed.growth import AppendableOrder
from raystride.pipelines.data.feed.mixture import SAMPLE_BITS, Mixture, split_samples
from raystride.pipelines.data.feed.order import Order, digest
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.writer import WrittenByNewer
from raystride.pipelines.train.checkpoint.history import read_links
from raystride.pipelines.train.checkpoint.layout import (
    BRANCHED_FROM,
    checkpoint_names,
    content_sha256,
    newest_term,
    read_manifest,
    step_name,
)

CHUNK = 1 << 20
"""Positions per chunk: 8 MiB of numbers."""
AnyOrder = Order | AppendableOrder | Mixture
EpochDigests = dict[tuple[int, int], int]
"""Digests of the planned samples, by the number of a source and its epoch."""


class AuditFailed(Exception):
    """The manifests do not prove it; the message gives the place and the reason.

    `step` is that of the manifest that does not fit (None: none could be read, or the order itself is wrong). `parent_step`
    is that of the manifest before, if the two do not fit each other. `positions` are the first and the last position of the
    range that was not fed once each.
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
    """The result of a successful audit: the samples of these steps were each used exactly once an epoch."""

    steps: int
    samples: int
    """Samples fed, over all epochs."""
    samples_per_epoch: int
    """Samples of an epoch, over all sources."""
    checkpoints: int
    """Length of the chain from the newest checkpoint back to the start."""
    attempts: int
    """Number of attempts that wrote one of these checkpoints."""
    workers: tuple[int, ...]
    """Numbers of workers of the run, in the order of their first appearance."""
    dropped: tuple[int, ...] = ()
    """Numbers of the steps that were fed and then dropped because the guard found them bad."""
    left_out: int = 0
    """Samples that the guard skipped: not fed, but counted in `samples`."""
    branches: tuple[tuple[str, int], ...] = ()
    """Run and step at which a branch began, and those of its parent if that is one, newest first."""
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By source, the samples fed and the samples of an epoch; the only source of a run without a mixture is ""."""

    def __str__(self) -> str:
        workers = ", ".join(map(str, self.workers))
        exceptions = f"; {self.left_out:,} sample(s) were left out by the guard" if self.left_out else ""
        if self.dropped:
            exceptions += f"; {len(self.dropped)} step(s) changed nothing by the guard ({_format_steps(self.dropped)})"
        exceptions += "".join(f"; up to step {step} in run {run}" for run, step in self.branches)
        names = [name for name in self.by_source if name]
        epochs_by_source = ", ".join(f"{name} {self.by_source[name][0] / self.by_source[name][1]:.3g}" for name in names)
        exceptions += f"; epochs by source: {epochs_by_source}" if epochs_by_source else ""
        return (
            f"{self.samples:,} samples in {self.steps:,} steps, {self.samples / self.samples_per_epoch:.3g} epochs of "
            f"{self.samples_per_epoch:,}; each exactly once an epoch, none lost or repeated{exceptions} "
            f"({self.checkpoints} checkpoints of {self.attempts} attempt(s) on {workers} worker(s))"
        )


def audit(checkpoints: Folder) -> Audit:
    """Checks the chain of manifests from the newest one to the start. Raises AuditFailed."""
    chain = list(reversed(list(_walk_manifests(checkpoints))))
    newest, order = chain[-1], _parse_order(chain[-1]["order"])
    epochs: EpochDigests = defaultdict(int)
    for manifest in chain:
        if isinstance(order, Order) and (manifest["order"] is None or _parse_order(manifest["order"]) != order):
            message = f"{step_name(manifest['step'])} has the samples in another order than {step_name(newest['step'])}"
            raise AuditFailed(message, step=manifest["step"])
        first, end = manifest["positions"]
        # Sums modulo 2^64: neither the order nor the number of workers changes them.
        fed_digest = sum(int(rank_digest, 16) for rank_digest in manifest["fed"].values()) % 2**64
        # Samples that the guard skipped were planned but not fed; they count for the epoch all the same.
        skipped_digest = sum(
            _digest_range(order, *positions_left_out, defaultdict(int)) for positions_left_out in _skipped_ranges(manifest)
        )
        if (fed_digest + skipped_digest) % 2**64 != _digest_range(order, first, end, epochs):
            raise AuditFailed(
                f"{step_name(manifest['step'])}: its {len(manifest['fed'])} worker(s) did not feed the samples at positions "
                f"{first:,} to {end - 1:,} once each",
                step=manifest["step"],
                positions=(first, end - 1),
            )
    by_source = _check_epochs(order, newest["positions"][1], epochs)
    return Audit(
        steps=newest["step"],
        samples=newest["positions"][1],
        samples_per_epoch=sum(samples for _, samples in by_source.values()),
        by_source=by_source,
        checkpoints=len(chain),
        attempts=len({manifest["attempt"] for manifest in chain}),
        workers=tuple(dict.fromkeys(manifest["world"] for manifest in chain)),
        dropped=tuple(newest.get("state", {}).get("dropped", ())),
        branches=tuple(
            dict.fromkeys((origin["run"], origin["step"]) for each in reversed(chain) if (origin := each.get(BRANCHED_FROM)))
        ),
        left_out=sum(end - first for manifest in chain for first, end in _skipped_ranges(manifest)),
    )


def _parse_order(content: dict[str, Any]) -> AnyOrder:
    if "sources" in content:
        return Mixture.from_json(content)
    return AppendableOrder.from_json(content) if "generations" in content else Order(**content)


def _check_epochs(order: AnyOrder, end: int, epochs: EpochDigests) -> dict[str, tuple[int, int]]:
    """Returns by source ("" if there is only one) the samples fed before position `end` and the samples of an epoch.

    Raises AuditFailed if a whole epoch does not have each sample once.
    """
    sources: list[tuple[str, Order | AppendableOrder]]
    if isinstance(order, Mixture):
        counts, sources = order.counts(end).tolist(), [(source.name, source.order) for source in order.sources]
    else:
        counts, sources = [end], [("", order)]
    for number, ((name, own), count) in enumerate(zip(sources, counts, strict=True)):
        for epoch in range(count // own.samples):
            if epochs[number, epoch] != _digest_whole_epoch(own.samples, epoch, number):
                suffix = f" of {name}" if name else ""
                raise AuditFailed(f"the order of epoch {epoch}{suffix} does not visit each of {own.samples:,} samples once")
    return {name: (count, own.samples) for (name, own), count in zip(sources, counts, strict=True)}


def _skipped_ranges(manifest: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the ranges of positions (first, end) that the guard skipped since the manifest's parent."""
    first, end = manifest["positions"]
    slots = manifest.get("state", {}).get("left_out", ())
    return [(position, position + samples) for _, _, position, samples in slots if first <= position < end]


def _format_steps(steps: tuple[int, ...]) -> str:
    """Formats the first eight steps, counted from 1."""
    return ", ".join(str(step + 1) for step in steps[:8]) + (", ..." if len(steps) > 8 else "")


def _walk_manifests(checkpoints: Folder) -> Iterator[dict[str, Any]]:
    """Yields the manifests from the newest readable one back to the start, of a branch through those of its parent.

    Raises AuditFailed if the chain breaks.
    """
    names = reversed(checkpoint_names(checkpoints.names()))
    read = _reader(checkpoints)
    manifest = next(filter(None, map(read, names)), None)
    if manifest is None:
        raise AuditFailed("there is no manifest of a checkpoint that could be read")
    links = read_links(checkpoints)
    while True:
        yield manifest
        step, parent_step, first = manifest["step"], manifest["parent_step"], manifest["positions"][0]
        if parent_step == 0 and first == 0:
            return
        parent = (read(step_name(parent_step)) or links.get(parent_step)) if parent_step < step else None
        if parent is None and parent_step <= manifest.get(BRANCHED_FROM, {}).get("step", -1):
            checkpoints, read = _read_parent_run(checkpoints, manifest)
            links = read_links(checkpoints)
            parent = (read(step_name(parent_step)) or links.get(parent_step)) if parent_step < step else None
        if parent is None:
            message = f"{step_name(step)} follows {step_name(parent_step)}, of which there is no manifest"
            raise AuditFailed(message, step=step, parent_step=parent_step)
        if parent["positions"][1] != first:
            end = parent["positions"][1]
            message = f"{step_name(step)} begins at position {first:,}, but {step_name(parent_step)} ends before {end:,}"
            raise AuditFailed(message, step=step, parent_step=parent_step)
        manifest = parent


def _read_parent_run(checkpoints: Folder, manifest: dict[str, Any]) -> tuple[Folder, Callable[[str], dict[str, Any] | None]]:
    """Returns the checkpoints of the run that a branch began at, and what reads them. Raises AuditFailed if that step is not
    as it was."""
    origin, step = manifest[BRANCHED_FROM], manifest["step"]
    name, run = step_name(origin["step"]), origin["run"]
    parents = checkpoints.parent.parent / run / "checkpoints"
    read = _reader(parents)
    begun = read(name)
    link = read_links(parents).get(origin["step"]) if begun is None else None
    found_sha256 = link["manifest_sha256"] if link else begun and content_sha256(begun)
    if found_sha256 != origin["manifest_sha256"]:
        found = "of which there is no manifest" if found_sha256 is None else "whose manifest is not the one that it began at"
        raise AuditFailed(f"{step_name(step)} follows {name} of run {run}, {found}", step=step, parent_step=origin["step"])
    return parents, read


def _reader(checkpoints: Folder) -> Callable[[str], dict[str, Any] | None]:
    """Returns what reads manifests by name: with one request for the claim, not one a step. Raises AuditFailed."""
    try:
        return partial(_read_manifest, checkpoints, newest_term(checkpoints))
    except OSError as error:
        raise AuditFailed(f"the claim of {checkpoints} cannot be read ({error})") from error


def _read_manifest(checkpoints: Folder, newest: float, name: str) -> dict[str, Any] | None:
    """Returns a manifest, or None if it is missing, damaged or lacks a key that an audit needs. Raises AuditFailed."""
    try:
        manifest = read_manifest(checkpoints / name, newest)
    except WrittenByNewer as error:
        raise AuditFailed(str(error)) from error
    except OSError as error:
        raise AuditFailed(f"the manifest of {name} cannot be read, and may be whole ({error})") from error
    return manifest if {"step", "parent_step", "positions", "fed", "order", "world", "attempt"} <= manifest.keys() else None


def _digest_range(order: AnyOrder, first: int, end: int, epochs: EpochDigests) -> int:
    """Returns the digest of the samples at these positions, and adds it to the digests of their sources' epochs."""
    total = 0
    for start in range(first, end, CHUNK):
        positions = np.arange(start, min(end, start + CHUNK), dtype=np.int64)
        samples, sample_epochs = order.sample_ids_at(positions), order.epochs(positions)
        sources = split_samples(samples)[0]
        for source, epoch in np.unique(np.stack((sources, sample_epochs)), axis=1).T.tolist():
            in_group = (sources == source) & (sample_epochs == epoch)
            part = digest(np.array(epoch), samples[in_group])
            epochs[source, epoch] = (epochs[source, epoch] + part) % 2**64
            total = (total + part) % 2**64
    return total


def _digest_whole_epoch(samples: int, epoch: int, source: int) -> int:
    """Returns the digest of an epoch that has each sample of a source once."""
    first, starts = source << SAMPLE_BITS, range(0, samples, CHUNK)
    digests = (digest(np.array(epoch), np.arange(start, min(samples, start + CHUNK)) + first) for start in starts)
    return sum(digests) % 2**64


def main(arguments: list[str] | None = None) -> int:
    """Audits a run, prints one line, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m raystride.pipelines.train.checkpoint.audit",
        description="Proves that a run used every sample exactly once an epoch.",
    )
    parser.add_argument("run", help="the run's name")
    parser.add_argument("--storage", default="runs", help="folder or URI that the run lies in (default: runs)")
    given = parser.parse_args(arguments)
    checkpoints = Folder.from_uri(given.storage) / given.run / "checkpoints"
    if not checkpoints.exists():
        print(f"{given.run}: there are no checkpoints at {checkpoints}. Is --storage right?", file=sys.stderr)
        return 2
    try:
        print(f"{given.run}: {audit(checkpoints)}")
    except AuditFailed as reason:
        print(f"{given.run}: not proven: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
