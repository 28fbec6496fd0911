"""Settings of a profile: which tool watches which steps of which workers closely."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.section import Section, setting


@dataclass(frozen=True, kw_only=True)
class Profile(Section):
    """A close look at a few steps; its files lie under `profiles/` in the run's folder, and with the run in MLflow."""

    name: ClassVar[str] = "profile"

    tool: Literal["none", "torch", "memory", "nsys", "ncu"] = setting("none")
    """`torch`: a trace and the costliest operations. `memory`: what memory holds, and since when. `nsys`: Nsight Systems'
    time line. `ncu`: Nsight Compute's figures of each kernel on a GPU, with `launch.mode` inline. Nsight must be there."""
    steps: tuple[int, int] = setting((20, 25), at_least=1)
    """The first and the last step looked at, by the run's count. The first steps of an attempt are slower than the rest."""
    ranks: tuple[int, ...] = setting((0,), at_least=0)
    """The workers looked at, by number."""
    kernel: str = setting("")
    """With `ncu`, a regular expression of the kernels to measure; empty: all. Each one is run several times over."""
    stall_factor: float = setting(20.0, at_least=0)
    """A step that lasts so many times the usual, and at least 30 s, is a stall: where each thread of the worker stands is
    written down, and training goes on. 0: nobody looks."""

    def __post_init__(self) -> None:
        """Raises SettingError where `steps` is no first and last step, or `ranks` names no worker."""
        super().__post_init__()
        if len(self.steps) != 2 or self.steps[0] > self.steps[1]:
            raise self.error("steps", "must be a first and a last step, such as [20, 25]")
        if not self.ranks:
            raise self.error("ranks", "must name at least one worker, such as [0]; for no profile set profile.tool none")
