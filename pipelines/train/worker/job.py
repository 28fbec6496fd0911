"""The job description that the driver resolves and sends to every rank.

job = Job(config=config, run="my-run", attempt="20261121-101500-3f2a", ...)
summary = run_worker(job, WorkerInfo(rank=0, world=2), post, stopping)
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.train.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt of a run, resolved."""

    config: Config = field(repr=False)  # Ray shows a training's arguments to all users of its dashboard
    """The settings as given, including passwords in the tracking server's address."""
    run: str
    """The run's name."""
    attempt: str
    """The attempt's name: when it started, and four random digits."""
    term: int = field(default=0, kw_only=True)
    """The driver's term as the run's owner, to fence late writes (`checkpoint.fence`); 0: it owns nothing."""
    permit: Permit = field(default_factory=Permit, repr=False, compare=False)
    """The right to write the run's files, tested before each write."""
    folder: Folder
    """The run's folder."""
    prepared: Folder
    """The prepared data."""
    device: str
    """`cpu` or `cuda`."""
    threads: int
    """Threads of a worker on CPUs."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Environment facts in every checkpoint's manifest, such as versions and commit."""
    plugin_bundle: PluginBundle = field(default_factory=PluginBundle, repr=False)
    """Plug-ins registered in the driver's process."""
    started_at: float = field(default_factory=time.time)
    """When the job's process began, in seconds since 1970."""
    strategy: "Strategy | None" = field(default=None, repr=False)
    """Strategy that shares a model with other trainings in this process; None: the settings define the strategy."""
    labels: dict[str, str] = field(default_factory=dict)
    """Owner and tags of the run, as labels of its metrics."""
    milestones: dict[str, float] = field(default_factory=dict)
    """Times of milestones (seconds since 1970) on the way to the first step; see `TimeToFirstStep`."""


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Rank, world size and node of a worker."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    node: str = "localhost"
