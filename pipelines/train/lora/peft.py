"""Reads and writes adapters in PEFT's layout: `adapter_config.json`, and `adapter_model.safetensors` with PEFT's names.

PEFT itself is not needed. Unsupported features of the layout are refused by name.

    write_adapter(model, config.lora, Folder("runs/mine/export/adapter"), base="/models/llama")
    read_adapter(model, config.lora, Folder("/adapters/theirs"))      # the settings must be those of its configuration
"""

import math
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import fused_half, hf_names, peft_modules_to_save
from raystride.model.lora import Adapter, TargetLinear, find_targets, fully_trained_modules, iterate_adapters
from raystride.pipelines.config import LoraConfig, SettingError
from raystride.pipelines.config.lora import ALL_LINEAR
from raystride.pipelines.system.hub import ADAPTER, is_hub_name, name_and_revision
from raystride.pipelines.system.storage.folder import Folder

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_ROOT = "base_model.model."
_INITS = {"kaiming": True, "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapters by PEFT's names, fp32 copies on the CPU.

    Adapters initialised with a part of the weight (PiSSA, OLoRA) get twice the rank, to subtract that part again, so that
    they apply to the original base. Raises SettingError for a network without a Hugging Face layout.
    """
    layers = _peft_layers(model)
    tensors: dict[str, torch.Tensor] = {}
    halves: dict[str, dict[int, Adapter]] = {}
    for name, _, part, adapter in iterate_adapters(model):
        theirs, half = layers[name, part].hf_name, fused_half(model, name)
        if half is None:
            tensors |= _peft_tensors(theirs, *_adapter_matrices(adapter), adapter.magnitude)
        else:
            halves.setdefault(theirs, {})[half] = adapter
    for theirs, found in halves.items():
        tensors |= _peft_tensors(theirs, *_fuse_halves(found))
    tensors |= {name: parameter.detach() for name, parameter in _fully_trained_parameters(model).items()}
    return {name: tensor.float().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _peft_tensors(theirs: str, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Returns an adapter's tensors by PEFT's names."""
    found = {f"{_ROOT}{theirs}.{A}": a, f"{_ROOT}{theirs}.{B}": b}
    return found if magnitude is None else found | {f"{_ROOT}{theirs}.{MAGNITUDE}": magnitude.detach()}


def _adapter_matrices(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A and B, extended to subtract their initial delta from the weight."""
    a, b = adapter.a.detach(), adapter.b.detach()
    if adapter.a0 is not None and adapter.b0 is not None:
        a, b = torch.cat((a, adapter.a0)), torch.cat((b, -adapter.b0), 1)
    return a, b


def _fuse_halves(halves: Mapping[int, Adapter]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns A, B and magnitude of a layer with separate adapters for its first and second half of rows: their ranks add
    up."""
    if len(halves) < 2 and any(adapter.magnitude is not None for adapter in halves.values()):
        raise SettingError(
            "lora.targets has one of gate and up, and PEFT's layout one layer for both: with lora.dora name both",
            setting="lora.targets",
        )
    matrices = {number: _adapter_matrices(adapter) for number, adapter in sorted(halves.items())}
    no_rank = next(iter(matrices.values()))[1][:, :0]
    b = torch.block_diag(*(matrices[number][1] if number in matrices else no_rank for number in range(2)))
    magnitudes: list[torch.Tensor] = [
        half_magnitude for number in matrices if (half_magnitude := halves[number].magnitude) is not None
    ]
    return torch.cat([a for a, _ in matrices.values()]), b, torch.cat(magnitudes) if magnitudes else None


def _fully_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the fully trained parameters by PEFT's names. Raises SettingError for one that the layout lacks."""
    names, found = hf_names(model), {}
    for ours, module in fully_trained_modules(model).items():
        if not names(ours):
            message = f"model.head_dense: PEFT's layout, which follows Hugging Face's, has no {ours} of this network"
            raise SettingError(message, setting="model.head_dense")
        for name, parameter in module.named_parameters():
            found[f"{_ROOT}{names(ours)[0]}.{name}"] = parameter
    return found


def _peft_layers(model: nn.Module) -> dict[tuple[str, str], TargetLinear]:
    """Returns the layers of a network by our names. Raises SettingError if one with an adapter has no name in the layout."""
    found = {(layer.module, layer.part): layer for layer in find_targets(model, hf_names(model))}
    for name, _, part, _ in iterate_adapters(model):
        if not found[name, part].hf_name:
            raise SettingError(
                f"lora.targets has {found[name, part].our_name}: PEFT's layout, which follows Hugging Face's, has no such "
                f"layer of a {type(model).__name__} of these settings, so its adapters stay in the run's checkpoints",
                setting="lora.targets",
                value=found[name, part].our_name,
            )
    return found


def adapted_layers(model: nn.Module) -> set[str]:
    """Returns the base's layers with adapters, by their names in PEFT's layout. Raises SettingError as above."""
    layers = _peft_layers(model)
    return {layers[name, part].hf_name for name, _, part, _ in iterate_adapters(model)}


def describe_adapter(model: nn.Module, lora: LoraConfig, base: str) -> dict[str, Any]:
    """Returns the contents of `adapter_config.json`; `base` is the base's path, or a name on the hub with a revision."""
    layers = _peft_layers(model)
    named = [layers[name, part].hf_name for name, _, part, _ in iterate_adapters(model)]
    both = [name for name in named if named.count(name) == 2]
    all_names = {layer.hf_name for layer in layers.values() if layer.hf_name}
    all_names |= {name.removeprefix(_ROOT).rpartition(".")[0] for name in _fully_trained_parameters(model)}
    saved = peft_modules_to_save(model)
    has_double_rank = lora.init in ("pissa", "olora")
    rank, plain = 2 * lora.rank if has_double_rank else lora.rank, has_double_rank or not lora.rslora
    name, revision = name_and_revision(base) if is_hub_name(base) else (base, None)
    transposed = getattr(getattr(model, "shape", None), "architecture", "") == "gpt2"
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if saved else "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": lora.scale * rank if has_double_rank else _as_int_if_whole(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": _shortest_suffixes(set(named), all_names),
        "rank_pattern": dict.fromkeys(both, 2 * rank),
        "alpha_pattern": dict.fromkeys(both, _alpha_of_both(lora.scale, rank, plain=plain)),
        "use_rslora": not plain,
        "use_dora": lora.dora,
        "init_lora_weights": True if has_double_rank else _INITS[lora.init],
        "fan_in_fan_out": transposed,
        "bias": "none",
        "modules_to_save": list(saved) or None,
        "layers_to_transform": None,
    }


def _alpha_of_both(scale: float, rank: int, *, plain: bool) -> float:
    """Returns the alpha that keeps the scale of two adapters of a rank, written as one of twice the rank."""
    return scale * (2 * rank if plain else (2 * rank) ** 0.5)


def _as_int_if_whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _shortest_suffixes(chosen_names: set[str], all_names: set[str]) -> list[str]:
    """Returns name suffixes, from a dot on, that match these and no other names; PEFT matches such."""
    found = set()
    for name in chosen_names:
        parts = name.split(".")
        ends = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        found.add(
            next(
                end
                for end in ends
                if {other_name for other_name in all_names if _has_suffix(other_name, end)} <= chosen_names
            )
        )
    return sorted(found)


def _has_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def write_adapter(model: nn.Module, lora: LoraConfig, folder: Folder, base: str) -> Folder:
    """Writes adapters into a folder that `PeftModel.from_pretrained` loads, and returns it; the description comes last."""
    from safetensors.torch import save_file

    tensors, description = adapter_tensors(model), describe_adapter(model, lora, base)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / WEIGHTS
        save_file(tensors, file, metadata={"format": "pt"})
        folder.upload(file, file.name)
    folder.put_json(CONFIG, description)
    return folder


@torch.no_grad()
def read_adapter(model: nn.Module, lora: LoraConfig, folder: Folder) -> None:
    """Loads a network's adapters from a folder in PEFT's layout.

    Raises SettingError if there are none, or of other settings, with the flags that describe them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from raystride.model.cut import fill_parameter

    try:
        description, tensors = folder.read_json(CONFIG), load(folder.read(WEIGHTS))
    except (FileNotFoundError, ValueError, SafetensorError) as error:
        raise _setting_error(folder, f"it must hold {CONFIG} and {WEIGHTS} ({error})") from None
    _check_description(model, lora, folder, description)
    layers, used = _peft_layers(model), set()
    for name, _, part, adapter in iterate_adapters(model):
        half = fused_half(model, name)
        stored = {}
        for kind in _tensors_by_kind(adapter):
            expected_key = f"{_ROOT}{layers[name, part].hf_name}.{kind}"
            key = next((key for key in (expected_key, f"{expected_key}.weight") if key in tensors), None)
            if key is None:
                raise _setting_error(folder, f"it has no tensor {expected_key}")
            used.add(key)
            stored[kind] = tensors[key]
        try:
            stored = stored if half is None else _take_half(stored, half, lora.rank)
            for kind, parameter in _tensors_by_kind(adapter).items():
                fill_parameter(parameter, partial(_copy_same_shape, stored[kind]))
        except ValueError as error:
            raise _setting_error(folder, f"its tensors of {layers[name, part].hf_name} are {error}") from None
    for name, parameter in _fully_trained_parameters(model).items():
        if name in tensors:
            used.add(name)
            if tensors[name].shape != parameter.shape:
                found = tuple(tensors[name].shape)
                raise _setting_error(
                    folder, f"its {name} is {found}, where the labels of the data make it {tuple(parameter.shape)}"
                )
            fill_parameter(parameter, partial(_copy_same_shape, tensors[name]))
    if unused := tensors.keys() - used:
        raise _setting_error(
            folder, f"it has tensors for which these settings have no place: {', '.join(sorted(unused)[:3])}"
        )


def _take_half(stored: Mapping[str, torch.Tensor], half: int, rank: int) -> dict[str, torch.Tensor]:
    """Returns the adapter of half the rows of a layer: from one over all rows, or from the two that `_fuse_halves` merged.

    Raises ValueError if it is neither.
    """
    a, b = stored[A], stored[B]
    rows = len(b) // 2
    found = {name: tensor[half * rows : (half + 1) * rows] for name, tensor in stored.items() if name != A}
    if len(a) == 2 * rank and b.shape[1] == 2 * rank:
        own, other = (slice(number * rank, (number + 1) * rank) for number in (half, 1 - half))
        if found[B][:, other].any():
            raise ValueError(f"of rank {2 * rank} over gate and up together, where the settings have rank {rank} for each")
        a, found[B] = a[own], found[B][:, own]
    return {A: a, **found}


def _tensors_by_kind(adapter: Adapter) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {A: adapter.a, B: adapter.b}
    return found if adapter.magnitude is None else found | {MAGNITUDE: adapter.magnitude}


def _copy_same_shape(found: torch.Tensor, whole: torch.Tensor) -> None:
    if found.shape != whole.shape:
        raise ValueError(f"{tuple(found.shape)}, where the settings make it {tuple(whole.shape)}")
    whole.copy_(found)


_UNDERSTOOD = (
    "peft_type",
    "bias",
    "lora_bias",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "target_modules",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "modules_to_save",
)
"""PEFT's settings that are compared with those of the run, or refused with a reason of their own."""
_WITHOUT_EFFECT = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "fan_in_fan_out",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
)
"""Those that do not change what stored adapters add to a layer."""
_SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that keep the base's weights; PiSSA, OLoRA, CorDA and LoftQ subtract a part of them."""


def _check_description(model: nn.Module, lora: LoraConfig, folder: Folder, description: Mapping[str, Any]) -> None:
    if description.get("peft_type") != "LORA":
        raise _setting_error(folder, f"its peft_type is {description.get('peft_type')!r}, and only LORA can be read")
    if description.get("bias", "none") != "none" or description.get("lora_bias"):
        raise _setting_error(folder, "it has trained biases, which have no place here")
    known = {*peft_modules_to_save(model), "score"} if peft_modules_to_save(model) else set()
    saved = set(description.get("modules_to_save") or ())
    # Every other setting is off by default, in versions of PEFT to come as well.
    others = [key for key, value in description.items() if value and key not in _UNDERSTOOD + _WITHOUT_EFFECT]
    for key in others or (["modules_to_save"] if saved - known else []):
        raise _setting_error(folder, f"its {key} is {description[key]!r}, which has no place here")
    _check_patterns(model, lora, folder, description)
    if (init := description.get("init_lora_weights", True)) not in _SUPPORTED_INITS:
        raise _setting_error(
            folder,
            f"its init_lora_weights is {init!r}, so it belongs to what was left of the base's weights: have PEFT convert it "
            "by save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    pairs = {
        "rank": (lora.rank, description.get("r")),
        "alpha": (float(lora.alpha), float(description.get("lora_alpha", 0))),
        "rslora": (lora.rslora, bool(description.get("use_rslora"))),
        "dora": (lora.dora, bool(description.get("use_dora"))),
    }
    differing: dict[str, Any] = {
        f"lora.{key}": adapter_value for key, (configured, adapter_value) in pairs.items() if configured != adapter_value
    }
    flags = [f"--{key} {str(value).lower()}" for key, value in differing.items()]
    try:
        if targets := _other_targets(model, lora, description):
            flags.append(f"--lora.targets '{targets}'")
            differing["lora.targets"] = targets
    except ValueError as error:
        raise _setting_error(folder, f"its target_modules are {description.get('target_modules')!r}: {error}") from error
    if flags:
        raise _setting_error(
            folder, f"its adapters are not those that the settings describe: give {' '.join(flags)}", differing
        )


def _check_patterns(model: nn.Module, lora: LoraConfig, folder: Folder, description: Mapping[str, Any]) -> None:
    """Raises SettingError for ranks or alphas by layer, except those of gate and up written as one layer."""
    fused = {site.hf_name for site in find_targets(model, hf_names(model)) if fused_half(model, site.module) is not None}
    alpha = _alpha_of_both(lora.scale, lora.rank, plain=not lora.rslora)
    for key, both in (("rank_pattern", 2 * lora.rank), ("alpha_pattern", alpha)):
        pattern = description.get(key) or {}
        if any(name not in fused or not math.isclose(value, both) for name, value in pattern.items()):
            raise _setting_error(folder, f"its {key} is {pattern!r}, which has no place here")


def _other_targets(model: nn.Module, lora: LoraConfig, description: Mapping[str, Any]) -> str:
    """Returns the `lora.targets` that is needed instead; "" if it means the same layers. Raises ValueError if it means
    none."""
    targets, excluded = (description.get(key) or [] for key in ("target_modules", "exclude_modules"))
    if targets == ALL_LINEAR and not excluded:
        return "" if lora.all_linear else ALL_LINEAR
    named = [layer for layer in find_targets(model, hf_names(model)) if layer.hf_name]
    wanted = [layer for layer in named if _is_targeted(targets, layer.hf_name) and not _is_targeted(excluded, layer.hf_name)]
    if not wanted:
        raise ValueError("no layer of this network is meant by them")
    if {(layer.module, layer.part) for layer in wanted} == {(name, part) for name, _, part, _ in iterate_adapters(model)}:
        return ""
    names = _shortest_suffixes({layer.hf_name for layer in wanted}, {layer.hf_name for layer in named})
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _is_targeted(targets: str | list[str], name: str) -> bool:
    """Whether PEFT targets a layer: by a suffix from a dot on, or by a regular expression if a string is given."""
    if targets == ALL_LINEAR:
        return True
    if not isinstance(targets, str):
        return any(_has_suffix(name, target) for target in targets)
    try:
        return re.fullmatch(targets, name) is not None
    except re.error as error:
        raise ValueError(f"no regular expression ({error})") from error


def _setting_error(folder: Folder, problem: str, allowed: Any = None) -> SettingError:
    """Returns an error for `lora.init_from`; `allowed`: settings that would be valid, by full names."""
    message = f"lora.init_from is {folder.uri!r}: {problem}"
    return SettingError(message, setting="lora.init_from", value=folder.uri, allowed=allowed)
