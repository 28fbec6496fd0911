"""What every peer's script is told, and what it says while it runs: flags in, lines of JSON out.

A line is `{"event": "step", "step": 3, "time": 1.79e9}` (seconds since 1970) at the end of each optimiser step,
`{"event": "validation", "step": 250, "loss": 2.1, ...}` with the loss in nats on the whole validation tail, and last
`{"event": "done", "parameters_sha256": ...}`. Nothing here is what a user would write: `counting` leaves it out.

    job = read_job("accelerate_loop", __doc__)
    progress = Progress(job)
    progress.step(1)
    progress.done(model)
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

SEED = 1337


class Network(NamedTuple):
    """The shape of a network, and of its batch."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int


NETWORKS = {"small": Network(4, 4, 128, 64, 12), "10m": Network(8, 8, 320, 256, 8)}
"""nanoGPT's small one for CPUs, of 0.8 M parameters, and one of 9.9 M."""
NETWORK_VARIABLE = "PEERS_NETWORK"
"""Environment variable that names a training's network: scripts have its shape as constants, as their users would."""
NETWORK = NETWORKS[os.environ.get(NETWORK_VARIABLE, "small")]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training, for all peers alike."""

    text: Path
    """What is learnt: its first nine tenths; the rest is validated on."""
    progress: Path
    """File that events are appended to."""
    folder: Path
    """Where checkpoints lie."""
    steps: int = 2000
    """Optimiser steps, at whose end the learning rate is lowest."""
    workers: int = 1
    """Processes that train."""
    threads: int = 2
    """Threads of each of them."""
    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0 for none."""
    validate_every: int = 0
    """Steps from one validation to the next; 0 for none."""
    resume: bool = False
    """Go on from the newest checkpoint in the folder."""
    network: str = "small"
    """Name of the network."""

    def flags(self) -> list[str]:
        """Flags that `read_job` parses; the network is in the environment."""
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not False and field.name != "network":
                found += [f"--{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return found


def read_job(name: str, description: str | None, arguments: Sequence[str] | None = None) -> Job:
    """The job of the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.peers.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for place in ("text", "progress", "folder"):
        parser.add_argument(f"--{place}", type=Path, required=True)
    for number, default in (("steps", 2000), ("workers", 1), ("threads", 2), ("checkpoint-every", 0), ("validate-every", 0)):
        parser.add_argument(f"--{number}", type=int, default=default)
    parser.add_argument("--resume", action="store_true")
    return Job(**vars(parser.parse_args(arguments)), network=os.environ.get(NETWORK_VARIABLE, "small"))


def digest(model: "nn.Module") -> str:
    """SHA-256 of all parameters, by name."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return whole.hexdigest()


class Progress:
    """Appends a job's events to its file. Where several processes train, rank 0 has one that speaks."""

    def __init__(self, job: Job, rank: int = 0) -> None:
        self.file = job.progress
        self.speaks = rank == 0

    def step(self, step: int) -> None:
        """So many steps are done."""
        self._say({"event": "step", "step": step})

    def validation(self, step: int, loss: float, *, sampled: bool = False) -> None:
        """The loss in nats after so many steps; `sampled` where it is a peer's own estimate from random batches."""
        self._say({"event": "validation", "step": step, "loss": loss} | ({"sampled": True} if sampled else {}))

    def done(self, model: "nn.Module | None" = None) -> None:
        """The training is over."""
        self._say({"event": "done", "parameters_sha256": digest(model) if model is not None and self.speaks else None})

    def _say(self, event: dict[str, Any]) -> None:
        if self.speaks:
            with self.file.open("a") as stream:
                stream.write(json.dumps(event | {"time": time.time()}) + "\n")


def read_progress(file: Path) -> list[dict[str, Any]]:
    """The events so far, without a last line that is not whole yet."""
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
