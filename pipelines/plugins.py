"""Tasks, sources and observers of one's own: how they register, and how every process that needs them finds them.

    @register_source("tickets")                               # then: data.source tickets
    def tickets() -> Iterator[dict[str, str]]: ...

    load_plugins(["my_project.tasks", "tickets.py"])          # the setting `plugins`: modules, or files

What a module or a file registers is found again wherever the settings travel. What the running script itself registers
(`__main__`) goes along to workers by value, in `Carried`, and only it can open the run: its settings then say `__main__`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from raystride.pipelines.config import Config, SettingError

GROUP = "raystride.plugins"
"""The entry points by which an installed package names modules that register something."""
SCRIPT = "__main__"
"""Stands in a run's settings for the script that trained it."""

Documents = Callable[..., Iterator[Any]]
"""What yields texts, tuples in the order of a task's columns, or mappings by the names of columns; it may take the split."""
OWN_TASKS = ("language_model", "completion", "preference", "classification", "translation", "images")
"""The names of those of `pipelines.tasks`, which imports this module and not the other way round."""
TASKS: dict[str, Any] = {}
"""Subclasses of Task by name, besides those of `pipelines.tasks`."""
SOURCES: dict[str, tuple[Documents, str]] = {}
"""Functions by the name of their source, each with its version."""
OBSERVERS: dict[str, Callable[[], Any]] = {}
"""What makes an Observer, by its qualified name."""

Made = TypeVar("Made", bound=Callable[..., Any])


def register_task(name: str) -> Callable[[Made], Made]:
    """Makes `task: NAME` train this subclass of Task. Raises ValueError for a name that another class has."""

    def register(task: Made) -> Made:
        if name in OWN_TASKS:
            raise ValueError(f"the task {name!r} is one of Raystride's own: give yours another name")
        _refuse_another("task", name, TASKS.get(name), task)
        TASKS[name] = task
        return task

    return register


def register_source(name: str, version: str = "") -> Callable[[Made], Made]:
    """Makes `data.source: NAME` read the documents that the function yields, in the same order each time.

    A function of one argument is told which split is asked for: `data.split`, or what follows a `#` in the source's name.
    Its data is prepared again when the function's code changes; give it another `version` when only the data changed.
    Raises ValueError for a name that another function has.
    """

    def register(function: Made) -> Made:
        if name == "python":
            raise ValueError("the source 'python' is one of Raystride's own: give yours another name")
        _refuse_another("source", name, SOURCES.get(name, (None,))[0], function)
        SOURCES[name] = (function, version)
        return function

    return register


def register_observer(factory: Made) -> Made:
    """Has every worker make one of these (a subclass of Observer, or a function that returns one) and call its hooks.

    What its `on_log` adds to the measurements is recorded with them.
    """
    OBSERVERS[f"{factory.__module__}.{factory.__qualname__}"] = factory
    return factory


def _refuse_another(kind: str, name: str, known: Any, new: Any) -> None:
    """A module that is loaded again, as in a notebook, registers the same thing anew; anything else is a mistake."""
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"the {kind} {name!r} is registered twice: give one of them another name")


def load_plugins(plugins: Iterable[str]) -> None:
    """Imports these modules and files in this process; a second call does nothing more.

    Raises SettingError, which names the plug-in, where one is not there or fails.
    """
    for plugin in plugins:
        if plugin != SCRIPT:
            _load(plugin)


@cache
def installed_plugins() -> tuple[str, ...]:
    """The modules that installed packages name under `GROUP`. Looked up once, in 30 ms: workers are told them."""
    return tuple(sorted({point.module for point in entry_points(group=GROUP)}))


@cache
def _load(plugin: str) -> None:
    file = plugin_file(plugin)
    try:
        if file is None:
            import_module(plugin)
        else:
            _load_file(file)
    except ModuleNotFoundError as error:
        # The plug-in itself is missing, or a package that it lies in; any other name is one that it imports in vain.
        if error.name is None or not f"{plugin}.".startswith(f"{error.name}."):
            raise SettingError(f"plugins: {plugin!r} fails: {error!r}", setting="plugins", value=plugin) from error
        raise SettingError(
            f"plugins: there is no module {plugin!r} on Python's path; install it, start the job in its project's folder, "
            "or name its file",
            setting="plugins",
            value=plugin,
        ) from None
    except Exception as error:
        raise SettingError(f"plugins: {plugin!r} fails: {error!r}", setting="plugins", value=plugin) from error


def plugin_file(plugin: str) -> Path | None:
    """The file that a plug-in names, as it stands or beside what is imported; None for a module. Raises SettingError."""
    if not plugin.endswith(".py"):
        return None
    for place in ("", *sys.path):
        for name in (plugin, Path(plugin).name):
            if (found := Path(place) / name).is_file():
                return found.resolve()
    message = f"plugins: there is no file {plugin!r}, neither here nor on Python's path"
    raise SettingError(message, setting="plugins", value=plugin)


def plugin_code(plugins: Iterable[str]) -> list[str]:
    """The files and folders that hold these plug-ins, for a model that leaves this machine. Raises SettingError."""
    found = []
    for plugin in plugins:
        if plugin == SCRIPT:
            message = "plugins is __main__: what a script has registered cannot leave it; put it into a module"
            raise SettingError(message, setting="plugins", value=plugin)
        file = plugin_file(plugin)
        module = None if file else import_module(plugin.partition(".")[0])
        places = [str(file)] if file else list(getattr(module, "__path__", [])) or [str(getattr(module, "__file__", ""))]
        found.append(places[0])
    return list(dict.fromkeys(found))


def _load_file(file: Path) -> None:
    """Imports a file under a name of its own; its classes travel by value, since no other process knows that name."""
    name = f"raystride_plugin_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if find_spec("ray"):  # the loop runs without
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True)
class Carried:
    """What the running script has registered, which travels to workers by value, and the plug-ins of installed packages."""

    installed: tuple[str, ...] = ()
    tasks: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    observers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls) -> "Carried":
        """What the script of this process has registered, and the plug-ins of its installed packages, to be sent along."""
        return cls(
            installed_plugins(),
            {name: task for name, task in TASKS.items() if task.__module__ == SCRIPT},
            {name: source for name, source in SOURCES.items() if source[0].__module__ == SCRIPT},
            {name: made for name, made in OBSERVERS.items() if made.__module__ == SCRIPT},
        )

    def needed(self, config: Config) -> list[str]:
        """The plug-ins without which a run of these settings cannot be opened, to be named in them: installed ones, and the
        script. Needs `register`."""
        read = [each.data for each in config.by_source().values()]
        sources = (name for data in read for name in (data.source, data.validation_source, data.test_source))
        named = {name.partition("#")[0] for name in sources if name}
        used = [TASKS[config.task]] if config.task in TASKS else []
        used += [SOURCES[name][0] for name in sorted(named & set(SOURCES))]
        packages = {made.__module__.partition(".")[0] for made in used}
        script = [SCRIPT] if config.task in self.tasks or named & set(self.sources) or self.observers else []
        return [plugin for plugin in self.installed if plugin.partition(".")[0] in packages] + script

    def register(self) -> None:
        """Registers all of it in the process that it travelled to. Raises SettingError where an installed plug-in fails."""
        load_plugins(self.installed)
        TASKS.update(self.tasks)
        SOURCES.update(self.sources)
        OBSERVERS.update(self.observers)
