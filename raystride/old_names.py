"""Names that modules had in 0.3, until 0.5: an import of one gives the module under its present name, and says so.

    from raystride.pipelines.tasks.task import Task           # is in raystride.pipelines.data.tasks.task

They stand in users' plug-ins, in models that were exported to MLflow, and in batch scripts that `raystride deploy` wrote
(`python -m raystride.pipelines.deploy.slurm`). Both names give one module: under two, a class would be two classes.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, cast

LAST_VERSION = "0.4"
"""Last version that knows the old names."""
_MOVED_TO_WINGS = {
    "system": "commands credentials hub limits node_folder output service_thread signals storage variables",
    "observability": "hardware observers pages phases profiling record report",
    "data": "feed plugins prepare pretrained sources tasks tokenizers",
    "train": "checkpoint distributed lora memory own_model strategies worker",
    "launch": "cluster console deploy hang preflight run_store",
    "sweep": "scaling_model",
}
_MOVED_ALONE = {
    "autotune": "train.worker",
    "autotune.machine_table": "system.machine_table",
    "checkpoint.fingerprint": "train.checkpoint.pieces",
    "checkpoint.load": "train.checkpoint.manager",
    "checkpoint.updater": "train.checkpoint.train_state",
    "cluster.logins": "launch.cluster.recorder_handle",
    "cluster.nodes": "launch.cluster.network",
    "config.condition": "config.sweep",
    "config.profile": "config.run",
    "deploy.own_tls": "launch.deploy.own_ray",
    "deploy.wait_for_nodes": "launch.cluster.wait_for_nodes",
    "evaluate.encoder_export": "evaluate.export",
    "evaluate.middleware": "evaluate.serving",
    "evaluate.pictures": "evaluate.evaluation",
    "evaluate.writing": "data.tasks.text_generation",
    "feed.bundles": "data.feed.samples",
    "feed.concurrency": "data.feed.cache",
    "hardware.heap": "system.heap",
    "hardware.peaks": "observability.observers.throughput",
    "hardware.processor": "system.limits",
    "hardware.rapl": "observability.hardware.energy",
    "launch.workers": "launch.train_job",
    "memory.adapters": "train.memory.estimate",
    "observers.background": "observability.observers.observer",
    "own_model.apply": "evaluate.apply_own_model",
    "own_model.export": "evaluate.export_own_model",
    "prepare.stage_speed": "data.prepare.progress",
    "record.audit": "train.checkpoint.audit",
    "scaling_model.identified": "sweep.scaling_model.fit",
    "strategies.mesh.pipeline_stage": "train.strategies.mesh.pipeline",
    "tasks.chats": "data.tasks.completion",
    "tasks.overlap": "data.tasks.translation",
    "tasks.padding": "data.tasks.rows",
    "tasks.row_losses": "data.tasks.rows",
    "tokenizers.alphabets": "data.tokenizers.byte_pairs",
    "tokenizers.generation_tag": "data.tokenizers.chat",
    "tokenizers.long_runs": "data.tokenizers.byte_pairs",
    "worker.device": "train.worker.build",
    "worker.samples": "train.worker.run",
}
_PIPELINES = "raystride.pipelines."
NEW_NAMES: dict[str, str] = {
    **{
        f"{_PIPELINES}{name}": f"{_PIPELINES}{wing}.{name}"
        for wing, names in _MOVED_TO_WINGS.items()
        for name in names.split()
    },
    **{f"{_PIPELINES}{old}": f"{_PIPELINES}{new}" for old, new in _MOVED_ALONE.items()},
    f"{_PIPELINES}run_store.stored_config": "raystride.jobs.train",
    "raystride.model.feed_forward": "raystride.model.block",
}
"""Present names of packages and modules by their old ones; what is inside a package moved with it."""


def find_row(name: str) -> str | None:
    """Returns the key of `NEW_NAMES` that an old name falls under: itself or a package around it; None for other names."""
    while name.count(".") > 1:
        if name in NEW_NAMES:
            return name
        name = name.rpartition(".")[0]
    return None


def new_name(name: str) -> str:
    """Returns the present name of a module; the same if it is not an old one."""
    row = find_row(name)
    return name if row is None else NEW_NAMES[row] + name.removeprefix(row)


class _OldNames:
    """Finds modules by their old names: a finder and loader by the methods alone, as importlib.abc takes 25 ms to import."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._own_specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the specification of an alias; None for any other name."""
        present = find_spec(new_name(name)) if find_row(name) else None
        if present is None:
            return None
        return ModuleSpec(name, cast(Any, self), is_package=present.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module under its present name, and says once for each row of the table that there is one."""
        if (row := find_row(spec.name)) and row not in self._named:
            self._named.add(row)
            message = f"{row} is {NEW_NAMES[row]} now; the old name works until {LAST_VERSION}"
            warnings.warn(message, FutureWarning, stacklevel=2)
        module = import_module(new_name(spec.name))
        self._own_specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own specification back, which an import replaces; its code has run."""
        if module.__spec__ and module.__spec__.name in self._own_specs:
            module.__spec__ = self._own_specs[module.__spec__.name]

    def get_code(self, name: str) -> CodeType | None:
        """Returns the code that `python -m` runs."""
        present = find_spec(new_name(name))
        loader: Any = present and present.loader
        return loader.get_code(new_name(name)) if loader else None  # type: ignore[no-any-return]


def install() -> None:
    """Makes the old names importable in this process."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())  # a folder that an earlier checkout left would be found as a package
