"""Records which of the project's files run while a test file's tests run, in every process that they start.

A `.pth` file of the environment imports this module in each of its interpreters, if $RAYSTRIDE_MAP names a folder. It holds
`current`, the path of the test file that runs, and gets a file a process: a line for each pair of test file and source file,
written at once, so that SIGKILL loses none. A source counts if a function of it runs, a page or template if it is opened.
Python 3.12 and later show each function once a process and test file (`sys.monitoring`), which costs next to nothing. Python
3.11 shows every call (`sys.settrace`), but none in threads that are not Python's, such as those of Ray's concurrent actors.

    RAYSTRIDE_MAP=build/map/gw0 python -c "import tests.source_trace"      # in a .pth file: see tests/source_map.py
"""

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))
PACKAGES = ("pipelines", "model", "triton_kernels", "ray_jobs", "configs", "deploy")
MONITORING_TOOL = 4
"""The number under which `sys.monitoring` knows this module; coverage's and debuggers' are others."""
CO_OPTIMIZED = 1
"""Flag of a function's code, which those of modules and classes lack."""
HAS_MONITORING = sys.version_info >= (3, 12)
_is_traced = False


def relative_path(path: str) -> str | None:
    """Returns a file's path in the project, also that of a copy in an installed package; None for what is not ours."""
    if "/raystride/" in path:
        inside = path.rpartition("/raystride/")[2]
        return inside if inside.startswith(PACKAGES) else f"raystride/{inside}" if "/" not in inside else None
    if not path.startswith(ROOT + os.sep):
        return None
    inside = path[len(ROOT) + 1 :]
    return None if inside.startswith((".", "build/", "runs/")) or "__pycache__" in inside else inside


class SourceTrace:
    """The pairs that one process has noted so far, and its file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._written: set[str] = set()
        self._current = ""
        self._pid = 0
        self._file = -1
        self.restart()

    def restart(self) -> None:
        """Looks at all functions anew: in a forked process, and when another test file begins."""
        try:
            with open(os.path.join(self._folder, "current")) as file:
                self._current = file.read()
        except OSError:
            self._current = ""
        self._written.clear()
        if HAS_MONITORING:
            sys.monitoring.restart_events()

    def on_start(self, code: CodeType, offset: int) -> object:
        """Notes the file of a function that begins for the first time."""
        if code.co_flags & CO_OPTIMIZED:
            self._note(code.co_filename)
        return sys.monitoring.DISABLE

    def on_call(self, frame: FrameType, event: str, argument: object) -> None:
        """Notes the file of a function that is called; returns None, so that nothing inside the function is traced."""
        code = frame.f_code
        if code.co_filename not in self._written and code.co_flags & CO_OPTIMIZED:
            self._note(code.co_filename)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Notes a page, template or data file that is opened; an audit hook."""
        if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith((".py", ".pyc")):
            self._note(os.path.abspath(arguments[0]))

    def _note(self, path: str) -> None:
        if path in self._written or not self._current:
            return
        self._written.add(path)
        source = relative_path(path)
        if source is None or os.path.basename(source).startswith("test_"):
            return
        if self._pid != os.getpid():
            self._pid = os.getpid()
            name = os.path.join(self._folder, f"{self._pid}-{os.urandom(4).hex()}.tsv")
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(self._file, f"{self._current}\t{source}\n".encode())


def start() -> SourceTrace | None:
    """Traces this process and those that it forks, if $RAYSTRIDE_MAP names a folder of a pytest process.

    Returns None if it does not, or the process is traced already. Threads that run already are not traced on Python 3.11.
    """
    global _is_traced
    folder = os.environ.get("RAYSTRIDE_MAP")
    if _is_traced or not folder or not os.path.exists(os.path.join(folder, "current")):
        return None
    _is_traced = True
    trace = SourceTrace(folder)
    os.register_at_fork(after_in_child=trace.restart)
    sys.addaudithook(trace.on_event)
    if HAS_MONITORING:
        sys.monitoring.use_tool_id(MONITORING_TOOL, "raystride-source-map")
        sys.monitoring.register_callback(MONITORING_TOOL, sys.monitoring.events.PY_START, trace.on_start)
        sys.monitoring.set_events(MONITORING_TOOL, sys.monitoring.events.PY_START)
    else:
        threading.settrace(trace.on_call)
        sys.settrace(trace.on_call)
    return trace
