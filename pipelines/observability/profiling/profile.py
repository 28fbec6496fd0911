"""Observer that profiles a window of steps with one tool; files and a page go to `profiles/` in the run's folder.

    observers = [ProfileObserver(config.profile, job.folder, sender, throughput.on_pause), throughput, ...]

It comes first, so that it can report its own seconds to the throughput observer as a pause. A failed profile never ends the
training: a tool that fails, or leaves no report, becomes a warning with the reason.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from raystride.pipelines.config.run import ProfileConfig
from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.pages import heading, html_page
from raystride.pipelines.observability.phases import PHASES, Listener, phase, set_listener
from raystride.pipelines.observability.profiling.nsight_commands import ProfileError
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender
    from raystride.pipelines.observability.record.summary import RunSummary

from raystride.pipelines.observability.pages import html_table, paragraph
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.record.entry import new_entry

PROFILES_FOLDER = "profiles"
TITLES = {
    "torch": "PyTorch's profile",
    "memory": "Memory",
    "nsys": "Nsight Systems",
    "ncu": "Nsight Compute",
}


class Tool(Protocol):
    """Interface of a profiler for one window of steps."""

    listener: Listener | None
    """Called with every phase while the window is open."""

    def open(self) -> None:
        """Starts profiling, before the first step of the window."""

    def close(self, scratch: Path, stem: str) -> list[str]:
        """Stops, writes files `<stem>...` into `scratch`, and returns sections of the page as HTML."""

    def abandon(self) -> None:
        """Stops without writing anything, after an error."""


class ProfileObserver(Observer):
    """Observer that opens the tool before the window's first step, closes it after the last, and uploads its files."""

    def __init__(
        self,
        settings: ProfileConfig,
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
        self._opened_at_step: int | None = None

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
            self._tool = create_tool(self._settings.tool)
        except Exception as error:
            self._warn_of_error(error)
        self._open_if_due(run.step)

    def on_step(self, step: int) -> None:
        if self._tool is None:
            return
        if self._opened_at_step is None:
            self._open_if_due(step)
        elif step >= self._last:
            self._close_window(step)

    def on_error(self, error: BaseException) -> None:
        if self._tool is None:
            return
        set_listener(None)
        if self._opened_at_step is not None:
            try:
                self._tool.abandon()
            except Exception as problem:
                self._warn_of_error(problem)
        self._tool = None

    def on_end(self, summary: "RunSummary") -> None:
        if self._tool is None:
            return
        if self._opened_at_step is None:
            self._warn(f"the run ended before step {self._first}, where profile.steps begin: there is no profile")
        else:
            self._close_window(int(summary.get("steps") or self._last))

    def _open_if_due(self, step: int) -> None:
        """Opens the window after `step` if the next step belongs to it."""
        if self._tool is None or step < self._first - 1:
            return
        began_at = self._clock()
        try:
            self._tool.open()
        except Exception as error:
            # Any error of a tool ends the profile and not the training; the same below.
            self._tool = None
            self._warn_of_error(error)
        else:
            self._opened_at_step = step
            set_listener(self._tool.listener)
        self._pause(self._clock() - began_at)
        self._window_began_at = self._clock()
        self._seconds = {name: phase(name).seconds for name in PHASES}

    def _close_window(self, step: int) -> None:
        assert self._tool is not None
        assert self._opened_at_step is not None
        began_at = self._clock()
        # Cleared first, so that a later error does not close it a second time.
        tool, self._tool = self._tool, None
        set_listener(None)
        spent = {name: phase(name).seconds - before for name, before in self._seconds.items()}
        time_sections = phase_sections(
            spent, began_at - self._window_began_at, max(1, step - self._opened_at_step), self._run.device != "cpu"
        )
        steps = f"{self._opened_at_step + 1}-{step}"
        stem = f"{self._settings.tool}-rank{self._run.rank}-steps{steps}"
        with tempfile.TemporaryDirectory(prefix="profile-") as name:
            scratch = Path(name)
            try:
                tool_sections = tool.close(scratch, stem)
                title = f"{TITLES[self._settings.tool]}: {self._run.run}, rank {self._run.rank}, steps {steps}"
                (scratch / f"{stem}.html").write_text(
                    html_page(title, heading("Where the host's time goes"), time_sections, *tool_sections)
                )
                self._put_event("profile", f"steps {steps} on rank {self._run.rank}: {PROFILES_FOLDER}/{stem}.html")
            except Exception as error:
                self._warn_of_error(error)
            self._upload_files(scratch)
        self._pause(self._clock() - began_at)

    def _upload_files(self, scratch: Path) -> None:
        """Uploads the files to the run's folder, and has the recorder log them to MLflow."""
        for file in sorted(scratch.iterdir()):
            try:
                self._folder.upload(file, f"{PROFILES_FOLDER}/{file.name}")
            except Exception as error:
                self._warn_of_error(error)
            else:
                self._sender.put(new_entry("artifact", {"name": f"{PROFILES_FOLDER}/{file.name}"}))

    def _warn_of_error(self, error: Exception) -> None:
        kind = "" if isinstance(error, ProfileError) else f"{type(error).__name__}: "
        self._warn(f"there is no profile by {self._settings.tool} on rank {self._run.rank}: {kind}{error}")

    def _warn(self, text: str) -> None:
        self._put_event("warning", text)

    def _put_event(self, name: str, text: str) -> None:
        self._sender.put(new_entry("event", {"name": name, "text": text}))


def create_tool(name: str) -> Tool:
    """Creates the tool that `profile.tool` names. Raises ProfileError if it cannot work in this process."""
    if name == "torch":
        from raystride.pipelines.observability.profiling.torch_profiler import TorchTrace

        return TorchTrace()
    if name == "memory":
        from raystride.pipelines.observability.profiling.torch_profiler import MemoryTimeline

        return MemoryTimeline()
    from raystride.pipelines.observability.profiling.nsight import ComputeWindow, SystemsWindow

    return SystemsWindow() if name == "nsys" else ComputeWindow()


def phase_sections(seconds: dict[str, float], elapsed: float, steps: int, on_gpu: bool) -> str:
    """Returns the host's time by phase as a sentence and a table. `elapsed` is the seconds of all steps of the window."""
    longest = max(EXCLUSIVE_PHASES, key=lambda name: seconds.get(name, 0.0))
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
    return paragraph(text) + html_table(["phase", "ms a step", "share"], rows) + paragraph(note)
