"""What a worker is told: everything that the driver resolved, in one object that travels to every rank.

job = Job(config=config, run="my-run", attempt="20261121-101500-3f2a", ...)
summary = run_worker(job, WorkerInfo(rank=0, world=2), post, stopping)
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config
from raystride.pipelines.files import Folder
from raystride.pipelines.plugins import Carried

if TYPE_CHECKING:
    from raystride.pipelines.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt of a run, resolved."""

    config: Config = field(repr=False)  # Ray shows a training's arguments to all who see its dashboard
    """The settings as given, with the tracking server's address and what passwords it holds."""
    run: str
    """The run's name."""
    attempt: str
    """The attempt's name: when it started, and four random digits."""
    term: int = field(default=0, kw_only=True)
    """The driver's term as the run's owner, the fence of late writes (`train.fence`); 0: it owns nothing."""
    folder: Folder
    """The run's folder."""
    prepared: Folder
    """The prepared data."""
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """Threads of a worker on CPUs."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What every checkpoint's manifest says of where it was made: versions, commit."""
    carried: Carried = field(default_factory=Carried, repr=False)
    """What the driver's own script has registered."""
    started_at: float = field(default_factory=time.time)
    """When the job's process began, in seconds since 1970."""
    strategy: "Strategy | None" = field(default=None, repr=False)
    """How this process shares a model with other trainings in it; None: it does not, and the settings say the strategy."""
    milestones: dict[str, float] = field(default_factory=dict)
    """What had been reached at which time (seconds since 1970) on the way to the first step; see `FirstStep`."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Which worker of how many this is, and on which node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str = "localhost"
