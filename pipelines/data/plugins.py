"""Registers users' tasks, sources and observers, and loads them in every process that needs them.

    @register_source("tickets")                               # then: data.source tickets
    def tickets() -> Iterator[dict[str, str]]: ...

    load_plugins(["my_project.tasks", "tickets.py"])          # the setting `plugins`: modules, or files

Plug-ins of a module or file are imported again in every process that has the settings. Plug-ins of the running script
(`__main__`) travel to workers by value, in `PluginBundle`, and only that script can open the run: its settings then contain
`__main__`.
"""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.data.stored_code import FILE_PREFIX, SCRIPT, check_stored_name, find_plugin_file, name_module

OWN_PACKAGE = "raystride"
ENTRY_POINT_GROUP = "raystride.plugins"
"""The entry-point group in which installed packages list modules that register plug-ins."""

FIT = "fit"
"""The task of all runs of `raystride.fit`."""
RUN_TASKS: dict[str, Any] = {}
"""Tasks of the runs that `raystride.fit` has trained in this process, by the URI of the run's folder."""
DocumentFunction = Callable[..., Iterator[Any]]
"""Yields texts, tuples in the order of a task's columns, or mappings by column name; may take the split as an argument."""
BUILT_IN_TASKS = ("language_model", "completion", "preference", "classification", "translation", "images")
"""The names of the tasks in `pipelines.data.tasks`, listed here since that package imports this module."""
TASKS: dict[str, Any] = {}
"""Registered subclasses of Task by name, without those of `pipelines.data.tasks`."""
SOURCES: dict[str, tuple[DocumentFunction, str]] = {}
"""Registered functions by source name, each with its version."""
OBSERVERS: dict[str, Callable[[], Any]] = {}
"""Factories of Observers, by qualified name."""

ConfigT = TypeVar("ConfigT", bound=Config)
RegisteredT = TypeVar("RegisteredT", bound=Callable[..., Any])


def register_task(name: str) -> Callable[[RegisteredT], RegisteredT]:
    """Registers a subclass of `raystride.Task` as `task: NAME`.

    Args:
        name: the name in the setting `task`.

    Returns:
        A decorator, which returns the class as it is.

    Raises:
        ValueError: another class has that name.

    Example:
        @raystride.register_task("tagging")
        class Tagging(raystride.Task): ...
    """

    def register(task: RegisteredT) -> RegisteredT:
        if name in BUILT_IN_TASKS:
            raise ValueError(f"the task {name!r} is one of Raystride's own: give yours another name")
        _check_not_registered("task", name, TASKS.get(name), task)
        TASKS[name] = task
        return task

    return register


def register_source(name: str, version: str = "") -> Callable[[RegisteredT], RegisteredT]:
    """Registers a function as `data.source: NAME`. It must yield its documents in the same order each time.

    A function with one argument gets the split: `data.split`, or the part of the source's name after a `#`. Its data is
    prepared again when the function's code changes.

    Args:
        name: the name in the setting `data.source`.
        version: any text; another one where only the data has changed, so that it is prepared again.

    Returns:
        A decorator, which returns the function as it is.

    Raises:
        ValueError: another function has that name.

    Example:
        @raystride.register_source("tickets")
        def tickets():
            yield {"text": "My invoice is wrong", "label": "billing"}
    """

    def register(function: RegisteredT) -> RegisteredT:
        if name == "python":
            raise ValueError("the source 'python' is one of Raystride's own: give yours another name")
        _check_not_registered("source", name, SOURCES.get(name, (None,))[0], function)
        SOURCES[name] = (function, version)
        return function

    return register


def register_observer(factory: RegisteredT) -> RegisteredT:
    """Registers an observer of trainings; each worker creates one and calls its hooks.

    Values that its `on_log` adds to the metrics are recorded with them.

    Args:
        factory: a subclass of `raystride.Observer`, or a function that returns an observer.

    Returns:
        The factory as it is, so that it can be used as a decorator.

    Example:
        @raystride.register_observer
        class Loud(raystride.Observer):
            def on_log(self, step, measured):
                print(step, measured.get("train_loss"))
    """
    OBSERVERS[f"{factory.__module__}.{factory.__qualname__}"] = factory
    return factory


def _check_not_registered(kind: str, name: str, known: Any, new: Any) -> None:
    """Raises ValueError if another object has the name; a reloaded module, as in a notebook, may register the same again."""
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"the {kind} {name!r} is registered twice: give one of them another name")


def load_plugins(plugins: Iterable[str]) -> None:
    """Imports these modules and files in this process, each once.

    Raises SettingError, which names the plug-in, if one is missing or fails, or if a stored file names it and it must not be
    loaded (`stored_code`).
    """
    listed = tuple(plugins)
    for plugin in listed:
        if plugin != SCRIPT:
            check_stored_name(plugin, "plugins", listed)
            _load_plugin(str(plugin), find_plugin_file(str(plugin)))


@cache
def installed_plugins() -> tuple[str, ...]:
    """Returns the modules that installed packages list under `ENTRY_POINT_GROUP`; a look-up of 30 ms, done once a job."""
    return tuple(sorted({point.module for point in entry_points(group=ENTRY_POINT_GROUP)}))


@cache
def _load_plugin(plugin: str, file: Path | None) -> None:
    """Imports a module, or this file of that name; files of one name in several folders are several plug-ins."""
    try:
        if file is None:
            import_module(plugin)
        else:
            _load_file(file)
    except ModuleNotFoundError as error:
        # The plug-in itself is missing, or its package; any other name is an import inside it that fails.
        if error.name is None or not f"{plugin}.".startswith(f"{error.name}."):
            raise SettingError(f"plugins: {plugin!r} fails: {error!r}", setting="plugins", value=plugin) from error
        raise SettingError(
            f"plugins: there is no module {plugin!r} on Python's path: start the job in its project's folder, install that "
            "project, or name its file",
            setting="plugins",
            value=plugin,
        ) from None
    except Exception as error:
        raise SettingError(f"plugins: {plugin!r} fails: {error!r}", setting="plugins", value=plugin) from error


def plugin_paths(plugins: Iterable[str]) -> list[str]:
    """Returns the files and folders of these plug-ins, to export them with a model. Raises SettingError."""
    found = []
    for plugin in plugins:
        if plugin == SCRIPT:
            message = "plugins is __main__: what a script has registered cannot leave it; put it into a module"
            raise SettingError(message, setting="plugins", value=plugin)
        file = find_plugin_file(plugin)
        module = None if file else import_module(plugin.partition(".")[0])
        places = [str(file)] if file else list(getattr(module, "__path__", [])) or [str(getattr(module, "__file__", ""))]
        found.append(places[0])
    return list(dict.fromkeys(found))


def _load_file(file: Path) -> None:
    """Imports a file under a unique module name; its classes are pickled by value, as other processes lack that module."""
    name = name_module(file)
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if find_spec("ray"):  # the training loop runs without Ray
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True)
class PluginBundle:
    """This process's registrations for a training or sweep: modules by name, the script's own by value."""

    installed: tuple[str, ...] = ()
    """Plug-in modules of installed packages, all of them."""
    imported: tuple[str, ...] = ()
    """Other modules that have registered the task or a source, and which no plug-in of the settings stands for."""
    tasks: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    observers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def collect(cls, config: Config) -> "PluginBundle":
        """Collects what this process's script and modules have registered for a run with these settings.

        Of tasks that is the run's own, as another, such as that of an earlier `raystride.fit`, may hold a data set.
        """
        known = {OWN_PACKAGE, SCRIPT, *(_package(plugin) for plugin in (*installed_plugins(), *config.plugins))}
        modules = (made.__module__ for made in _used_by(config))
        imported = (name for name in modules if _package(name) not in known and not name.startswith(FILE_PREFIX))
        return cls(
            installed_plugins(),
            tuple(dict.fromkeys(imported)),
            {name: task for name, task in TASKS.items() if task.__module__ == SCRIPT and name == config.task},
            {name: source for name, source in SOURCES.items() if source[0].__module__ == SCRIPT},
            {name: made for name, made in OBSERVERS.items() if made.__module__ == SCRIPT},
        )

    def complete(self, config: ConfigT) -> ConfigT:
        """Returns the settings with all of these that the run requires among its plug-ins. Needs `register`."""
        used = _used_by(config)
        packages = {_package(made.__module__) for made in used}
        installed = [plugin for plugin in self.installed if _package(plugin) in packages]
        script = [SCRIPT] if self.observers or any(made.__module__ == SCRIPT for made in used) else []
        return replace(config, plugins=tuple(dict.fromkeys([*config.plugins, *installed, *self.imported, *script])))

    def refuse_unpicklable(self, task_name: str) -> None:
        """Raises SettingError if something that this process's script has registered cannot be sent to workers."""
        task = self.tasks.get(task_name)
        parts = dict(task.parts_to_send()) if task else {}
        parts |= {f"the source {name}": source for name, (source, _) in self.sources.items()}
        refuse_unpicklable(parts | {f"the observer {name}": made for name, made in self.observers.items()})

    def for_workers(self) -> "PluginBundle":
        """Returns what is sent to the workers of a training on Ray, with data by reference."""
        return replace(self, tasks={name: task.for_workers() for name, task in self.tasks.items()})

    def register(self) -> None:
        """Registers all plug-ins in the receiving process. Raises SettingError if a module fails or is not there."""
        load_plugins((*self.installed, *self.imported))
        TASKS.update(self.tasks)
        SOURCES.update(self.sources)
        OBSERVERS.update(self.observers)


def refuse_unpicklable(parts: Mapping[str, Any]) -> None:
    """Raises SettingError for the first part that cannot be pickled, with the path to what in it cannot."""
    from ray import cloudpickle
    from ray.util import inspect_serializability

    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception as error:
            _, failures = inspect_serializability(part, name=name, print_file=io.StringIO())
            paths = [".".join(getattr(failure, "path", None) or (name, failure.name)) for failure in failures]
            what = f"{min(paths, default=name)}: {type(error).__name__}: {error}"
            raise SettingError(
                f"{name} cannot be sent to Ray's workers, since it cannot be pickled ({what}); create that where it is "
                "used, or use launch.mode inline",
                setting=name,
            ) from error


def _used_by(config: Config) -> list[Any]:
    """Returns the registered task and sources of a run with these settings."""
    read = [plugins_config.data for plugins_config in config.by_source().values()]
    sources = (name for data in read for name in (data.source, data.validation_source, data.test_source))
    named = {name.partition("#")[0] for name in sources if name}
    task = [TASKS[config.task]] if config.task in TASKS else []
    return task + [SOURCES[name][0] for name in sorted(named & set(SOURCES))]


def _package(module: str) -> str:
    return module.partition(".")[0]
