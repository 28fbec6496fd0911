"""Settings of a profile: which tool watches which steps of which workers closely."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.section import Section, setting


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """Profiling of selected steps. Files are in `profiles/` of the run's folder and with the run in MLflow."""

    name: ClassVar[str] = "profile"

    tool: Literal["none", "torch", "memory", "nsys", "ncu"] = setting("none", also="profiler enable_profiling")
    """Profiler. `torch`: a trace and the most expensive operations. `memory`: memory allocations over time. `nsys`: timeline
    of Nsight Systems. `ncu`: metrics of each GPU kernel by Nsight Compute, with `launch.mode` inline. Nsight must be
    installed."""
    steps: tuple[int, int] = setting((20, 25), at_least=1)
    """First and last step to profile, as counted by the run. The first steps of an attempt are slower than the rest."""
    ranks: tuple[int, ...] = setting((0,), at_least=0)
    """Ranks of the workers to profile."""
    kernel: str = setting("")
    """Regular expression of the kernels that `ncu` measures. Each is run several times. Empty: all kernels."""
    stall_factor: float = setting(20.0, at_least=0)
    """Factor over the usual duration from which a step counts as a stall. A stall lasts at least 30 s; the stack of each
    thread of the worker is saved, and training continues. 0: no detection of stalls."""

    def __post_init__(self) -> None:
        """Raises SettingError where `steps` is no first and last step, or `ranks` names no worker."""
        super().__post_init__()
        if len(self.steps) != 2 or self.steps[0] > self.steps[1]:
            raise self.error("steps", "must be a first and a last step, such as [20, 25]")
        if not self.ranks:
            raise self.error("ranks", "must name at least one worker, such as [0]; for no profile set profile.tool none")
