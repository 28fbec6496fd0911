"""A close look at a window of steps by one tool, with files and a page in `profiles/` of the run's folder.

    observers = [Profiled(config.profile, job.folder, sender, throughput.on_pause), throughput, ...]

It comes first, so that its own seconds can be told to the observer of speed as no training. The training goes on whatever
happens to a profile: a tool that fails, or leaves no report, is a warning that says why.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from raystride.pipelines.config.profile import Profile
from raystride.pipelines.files import Folder
from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.pages import heading, page
from raystride.pipelines.phases import PHASES, Listener, listen, phase
from raystride.pipelines.profiling.nsight_commands import ProfileError

if TYPE_CHECKING:
    from raystride.pipelines.record.sender import Sender
    from raystride.pipelines.record.summary import RunSummary

from raystride.pipelines.pages import paragraph, table
from raystride.pipelines.phases import PARTS
from raystride.pipelines.record.entry import new_entry

PLACE = "profiles"
TITLES = {
    "torch": "PyTorch's profile",
    "memory": "Memory",
    "nsys": "Nsight Systems",
    "ncu": "Nsight Compute",
}


class Tool(Protocol):
    """A profiler, as it watches one window of steps."""

    listener: Listener | None
    """Is told of every phase while the window is open."""

    def open(self) -> None:
        """Begins to watch, before the first step of the window."""

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Ends, writes files `<stem>...` into `scratch`, and returns parts of the page, as HTML."""

    def abandon(self) -> None:
        """Ends without writing anything, after an error."""


class Profiled(Observer):
    """Opens the tool before the window's first step, closes it after the last, and keeps what it found."""

    def __init__(
        self,
        settings: Profile,
        folder: Folder,
        sender: "Sender",
        pause: Callable[[float], None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._folder = folder
        self._sender = sender
        self._pause = pause
        self._tool: Tool | None = None
        self._run = RunFacts(run="", attempt="")
        self._first, self._last = settings.steps
        self._opened: int | None = None

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        if self._settings.tool == "none" or run.rank not in self._settings.ranks:
            return
        if run.step >= self._last:
            self._warn(
                f"profile.steps end at {self._last} and this attempt began after step {run.step}: there is no profile"
            )
            return
        try:
            self._tool = make_tool(self._settings.tool)
        except Exception as error:
            self._warn_of(error)
        self._open_if_due(run.step)

    def on_step(self, step: int) -> None:
        if self._tool is None:
            return
        if self._opened is None:
            self._open_if_due(step)
        elif step >= self._last:
            self._close(step)

    def on_error(self, error: BaseException) -> None:
        if self._tool is None:
            return
        listen(None)
        if self._opened is not None:
            try:
                self._tool.abandon()
            except Exception as problem:
                self._warn_of(problem)
        self._tool = None

    def on_end(self, summary: "RunSummary") -> None:
        if self._tool is None:
            return
        if self._opened is None:
            self._warn(f"the run ended before step {self._first}, where profile.steps begin: there is no profile")
        else:
            self._close(int(summary.get("steps") or self._last))

    def _open_if_due(self, step: int) -> None:
        """Opens after `step`, where the next one belongs to the window."""
        if self._tool is None or step < self._first - 1:
            return
        began = self._clock()
        try:
            self._tool.open()
        except Exception as error:
            # Whatever a tool raises ends the profile and not the training; so it is below.
            self._tool = None
            self._warn_of(error)
        else:
            self._opened = step
            listen(self._tool.listener)
        self._pause(self._clock() - began)
        self._began = self._clock()
        self._seconds = {name: phase(name).seconds for name in PHASES}

    def _close(self, step: int) -> None:
        assert self._tool is not None
        assert self._opened is not None
        began = self._clock()
        # Now, so that an error further down does not close it a second time.
        tool, self._tool = self._tool, None
        listen(None)
        spent = {name: phase(name).seconds - before for name, before in self._seconds.items()}
        where = phase_part(spent, began - self._began, max(1, step - self._opened), self._run.device != "cpu")
        steps = f"{self._opened + 1}-{step}"
        stem = f"{self._settings.tool}-rank{self._run.rank}-steps{steps}"
        with tempfile.TemporaryDirectory(prefix="profile-") as name:
            scratch = Path(name)
            try:
                found = tool.close(scratch, stem)
                title = f"{TITLES[self._settings.tool]}: {self._run.run}, rank {self._run.rank}, steps {steps}"
                (scratch / f"{stem}.html").write_text(page(title, heading("Where the host's time goes"), where, *found))
                self._tell("profile", f"steps {steps} on rank {self._run.rank}: {PLACE}/{stem}.html")
            except Exception as error:
                self._warn_of(error)
            self._keep(scratch)
        self._pause(self._clock() - began)

    def _keep(self, scratch: Path) -> None:
        """Copies what is there to the run's folder, and has the recorder log it to MLflow."""
        for file in sorted(scratch.iterdir()):
            try:
                self._folder.upload(file, f"{PLACE}/{file.name}")
            except Exception as error:
                self._warn_of(error)
            else:
                self._sender.put(new_entry("artifact", {"name": f"{PLACE}/{file.name}"}))

    def _warn_of(self, error: Exception) -> None:
        kind = "" if isinstance(error, ProfileError) else f"{type(error).__name__}: "
        self._warn(f"there is no profile by {self._settings.tool} on rank {self._run.rank}: {kind}{error}")

    def _warn(self, text: str) -> None:
        self._tell("warning", text)

    def _tell(self, name: str, text: str) -> None:
        self._sender.put(new_entry("event", {"name": name, "text": text}))


def make_tool(name: str) -> Tool:
    """The tool that `profile.tool` names. Raises ProfileError where it cannot work in this process."""
    if name == "torch":
        from raystride.pipelines.profiling.torch_profiler import TorchTrace

        return TorchTrace()
    if name == "memory":
        from raystride.pipelines.profiling.torch_profiler import MemoryTimeline

        return MemoryTimeline()
    from raystride.pipelines.profiling.nsight import ComputeWindow, SystemsWindow

    return SystemsWindow() if name == "nsys" else ComputeWindow()


def phase_part(seconds: dict[str, float], elapsed: float, steps: int, on_gpu: bool) -> str:
    """Where the host's time went, by phase: a sentence and a table. `elapsed` is that of all steps of the window."""
    longest = max(PARTS, key=lambda name: seconds.get(name, 0.0))
    text = (
        f"A step took {elapsed / steps * 1e3:.2f} ms by the host's clock, while being watched, which slows it down. "
        f"Most of it went into {longest}: {seconds.get(longest, 0.0) / elapsed:.0%}."
    )
    if on_gpu:
        text += " On a GPU the host's time of forward and backward is that of launching: the device works behind."
    rows = [
        [name, f"{seconds[name] / steps * 1e3:.3f}", f"{seconds[name] / elapsed:.1%}"]
        for name in PHASES
        if seconds.get(name, 0.0) > 0
    ]
    note = "step contains slot, reduce and update; slot contains forward and backward."
    return paragraph(text) + table(["phase", "ms a step", "share"], rows) + paragraph(note)
