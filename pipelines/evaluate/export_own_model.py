"""Exports models of users' own: as state dict (other models, too), in the layout of Hugging Face, or as a program that
runs without their code.

export_own_model(opened, "state_dict", folder)            # model.safetensors and state_dict.pt
export_own_model(opened, "torch_export", folder)          # model.pt2, for torch.export.load
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raystride.pipelines.config import SettingError
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model.samples import read_batch
from raystride.pipelines.train.own_model.task import OwnModelTask

NUM_EXAMPLES = 2
"""Samples of the batch that a program is traced with; with one, its size would be taken for a constant."""


def export_own_model(opened: LoadedModel, to: str, folder: Folder) -> Folder:
    """Writes a run's module into a folder and returns it.

    Raises SettingError if the module cannot be written so, or a package is missing.
    """
    module = getattr(opened.model, "users_module", opened.model)
    writers: dict[str, Callable[[LoadedModel, nn.Module, Path], None]] = {
        "state_dict": _write_state_dict,
        "hugging_face": _write_pretrained,
        "torch_export": _write_program,
        "onnx": _write_onnx,
    }
    if to not in writers:
        rule = f"must be one of {', '.join(writers)} for a model of your own"
        raise SettingError(f"to is {to!r}: it {rule}", setting="to", value=to, allowed=tuple(writers))
    with tempfile.TemporaryDirectory() as place:
        writers[to](opened, module, Path(place))
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                folder.upload(file, str(file.relative_to(place)))
    return folder


def _write_state_dict(opened: LoadedModel, module: nn.Module, place: Path) -> None:
    from safetensors.torch import save_file

    state = module.state_dict()
    torch.save(state, place / "state_dict.pt")
    # safetensors refuses tensors that share memory: tied weights have a copy under each name, so that a strict load fits.
    copies = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    save_file(copies, place / "model.safetensors")


def _write_pretrained(opened: LoadedModel, module: nn.Module, place: Path) -> None:
    save = getattr(module, "save_pretrained", None)
    if save is None:
        rule = "must be `state_dict`, `torch_export` or `onnx` for a module without save_pretrained()"
        raise SettingError(f"to is 'hugging_face': it {rule}", setting="to", value="hugging_face", allowed=rule)
    save(place)


def _write_program(opened: LoadedModel, module: nn.Module, place: Path) -> None:
    torch.export.save(_trace(opened, module), place / "model.pt2")


def _write_onnx(opened: LoadedModel, module: nn.Module, place: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        message = f"to is 'onnx': it needs the package {error.name}; pip install onnx onnxscript"
        raise SettingError(message, setting="to", value="onnx") from error
    torch.onnx.export(_trace(opened, module), f=str(place / "model.onnx"), dynamo=True, verbose=False)


def _trace(opened: LoadedModel, module: nn.Module) -> Any:
    """Returns the program of a module's forward, with the arguments that the loss calls it with, for any batch size.

    Raises SettingError if PyTorch cannot trace it.
    """
    arguments, named = _record_arguments(opened, module)
    shapes = torch.export.ShapesCollection()
    for value in torch.utils._pytree.tree_leaves((arguments, named)):
        if isinstance(value, torch.Tensor) and value.dim():
            shapes[value] = {0: torch.export.Dim.AUTO}
    try:
        return torch.export.export(module, arguments, named, dynamic_shapes=shapes)  # type: ignore[arg-type]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"to: torch.export cannot trace the model: {lines[0]}; state_dict writes its weights"
        raise SettingError(message, setting="to") from error


def _record_arguments(opened: LoadedModel, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what the loss calls the module with, for the first samples of the training."""
    task = opened.task
    assert isinstance(task, OwnModelTask)
    dataset = task.own_model.open_split("train", opened.config.fit)
    assert dataset is not None
    content = read_batch(dataset, task.own_model.collate, np.arange(min(NUM_EXAMPLES, len(dataset))), opened.config.seed)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = module.register_forward_pre_hook(lambda _, given, named: calls.append((given, named)), with_kwargs=True)
    try:
        with torch.no_grad():
            task.own_model.loss(module, content)
    finally:
        hook.remove()
    if not calls:
        raise SettingError("to: the loss does not call the model itself, so its inputs are not known", setting="to")
    return calls[0]
