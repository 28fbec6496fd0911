"""Adapters in PEFT's layout, both ways: `adapter_config.json`, and `adapter_model.safetensors` with PEFT's names.

PEFT itself is not needed. What its layout cannot hold is refused by name.

    write_adapter(model, config.lora, Folder("runs/mine/export/adapter"), base="/models/llama")
    read_adapter(model, config.lora, Folder("/adapters/theirs"))      # the settings must be those of its configuration
"""

import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import half_there, names_there
from raystride.model.lora import Adapter, Site, adapted, sites
from raystride.pipelines.config import Lora, SettingError
from raystride.pipelines.config.lora import ALL_LINEAR
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import ADAPTER, is_hub_name, name_and_revision

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
_ROOT = "base_model.model."
_INITS = {"kaiming": True, "gaussian": "gaussian", "pissa": "pissa", "olora": "olora"}


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters by PEFT's names, fp32 copies on the CPU.

    Of adapters that began with a part of the weight (PiSSA, OLoRA), with twice the rank, what takes that part out again: so
    they belong to the base as it was. Raises SettingError for a network that Hugging Face's layouts do not have.
    """
    there = _there(model)
    tensors: dict[str, torch.Tensor] = {}
    halves: dict[str, dict[int, Adapter]] = {}
    for name, _, part, adapter in adapted(model):
        if half := half_there(model, name):
            halves.setdefault(half[0], {})[half[1]] = adapter
        else:
            tensors |= _by_names(there[name, part].theirs, *_matrices(adapter), adapter.magnitude)
    for theirs, found in halves.items():
        tensors |= _by_names(theirs, *_of_both(found))
    return {name: each.float().cpu().clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}


def _by_names(theirs: str, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None) -> dict[str, torch.Tensor]:
    found = {f"{_ROOT}{theirs}.lora_A.weight": a, f"{_ROOT}{theirs}.lora_B.weight": b}
    return found if magnitude is None else found | {f"{_ROOT}{theirs}.lora_magnitude_vector": magnitude.detach()}


def _matrices(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, with what takes out the part of the weight that they began with."""
    a, b = adapter.a.detach(), adapter.b.detach()
    if adapter.a0 is not None and adapter.b0 is not None:
        a, b = torch.cat((a, adapter.a0)), torch.cat((b, -adapter.b0), 1)
    return a, b


def _of_both(halves: Mapping[int, Adapter]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A, B and magnitude of a layer whose first rows have one adapter and whose others another: their ranks add up."""
    if len(halves) < 2 and any(each.magnitude is not None for each in halves.values()):
        raise SettingError(
            "lora.targets has one of gate and up, and PEFT's layout one layer for both: with lora.dora name both",
            setting="lora.targets",
        )
    made = {number: _matrices(adapter) for number, adapter in sorted(halves.items())}
    nothing = next(iter(made.values()))[1][:, :0]
    b = torch.block_diag(*(made[number][1] if number in made else nothing for number in range(2)))
    magnitudes: list[torch.Tensor] = [each for number in made if (each := halves[number].magnitude) is not None]
    return torch.cat([a for a, _ in made.values()]), b, torch.cat(magnitudes) if magnitudes else None


def _there(model: nn.Module) -> dict[tuple[str, str], Site]:
    """The layers of a network by our names. Raises SettingError where one that has an adapter has no name there."""
    found = {(each.module, each.part): each for each in sites(model, names_there(model))}
    for name, _, part, _ in adapted(model):
        if not found[name, part].theirs and not half_there(model, name):
            raise SettingError(
                f"lora.targets has {found[name, part].ours}: PEFT's layout, which follows Hugging Face's, has no such layer "
                f"of a {type(model).__name__} of these settings, so its adapters stay in the run's checkpoints",
                setting="lora.targets",
                value=found[name, part].ours,
            )
    return found


def describe_adapter(model: nn.Module, lora: Lora, base: str) -> dict[str, Any]:
    """What `adapter_config.json` says; `base` is where the base lies: a place, or a name on the hub with a revision."""
    there = _there(model)
    halves = {name: half[0] for name, *_ in there if (half := half_there(model, name))}
    named = [halves.get(name) or there[name, part].theirs for name, _, part, _ in adapted(model)]
    both = [name for name in named if named.count(name) == 2]
    all_names = {each.theirs for each in there.values() if each.theirs} | {*halves.values()}
    doubled = lora.init in ("pissa", "olora")
    rank, plain = 2 * lora.rank if doubled else lora.rank, doubled or not lora.rslora
    name, revision = name_and_revision(base) if is_hub_name(base) else (base, None)
    transposed = getattr(getattr(model, "shape", None), "flavour", "") == "gpt2"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": lora.scale * rank if doubled else _whole(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": _shortest(set(named), all_names),
        "rank_pattern": dict.fromkeys(both, 2 * rank),
        "alpha_pattern": dict.fromkeys(both, lora.scale * (2 * rank if plain else (2 * rank) ** 0.5)),
        "use_rslora": not plain,
        "use_dora": lora.dora,
        "init_lora_weights": True if doubled else _INITS[lora.init],
        "fan_in_fan_out": transposed,
        "bias": "none",
        "modules_to_save": None,
        "layers_to_transform": None,
    }


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _shortest(chosen_names: set[str], all_names: set[str]) -> list[str]:
    """Ends of names, from a dot on, that mean these and no others; PEFT looks for such."""
    found = set()
    for name in chosen_names:
        parts = name.split(".")
        ends = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        found.add(next(end for end in ends if {each for each in all_names if _ends(each, end)} <= chosen_names))
    return sorted(found)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def write_adapter(model: nn.Module, lora: Lora, folder: Folder, base: str) -> Folder:
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
def read_adapter(model: nn.Module, lora: Lora, folder: Folder) -> None:
    """Gives a network's adapters the values of a folder in PEFT's layout.

    Raises SettingError where there is none, or one of other settings, with the flags that describe it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from raystride.model.cut import fill

    try:
        description, tensors = folder.read_json(CONFIG), load(folder.read(WEIGHTS))
    except (FileNotFoundError, ValueError, SafetensorError) as error:
        raise _error(folder, f"it must hold {CONFIG} and {WEIGHTS} ({error})") from None
    _check_description(model, lora, folder, description)
    there = _there(model)
    left = dict(tensors)
    for name, _, part, adapter in adapted(model):
        for kind, parameter in _by_kind(adapter).items():
            key = f"{_ROOT}{there[name, part].theirs}.{kind}"
            found = left.pop(key, None)
            found = left.pop(f"{key}.weight", None) if found is None else found
            if found is None:
                raise _error(folder, f"it has no tensor {key}")
            try:
                fill(parameter, partial(_copy, found))
            except ValueError as error:
                raise _error(folder, f"its tensor {key} is {error}") from None
    if left:
        raise _error(folder, f"it has tensors for which these settings have no place: {', '.join(sorted(left)[:3])}")


def _by_kind(adapter: Adapter) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {"lora_A.weight": adapter.a, "lora_B.weight": adapter.b}
    return found if adapter.magnitude is None else found | {"lora_magnitude_vector": adapter.magnitude}


def _copy(found: torch.Tensor, whole: torch.Tensor) -> None:
    if found.shape != whole.shape:
        raise ValueError(f"{tuple(found.shape)}, where the settings make it {tuple(whole.shape)}")
    whole.copy_(found)


_UNKNOWN = (
    "modules_to_save",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "target_parameters",
)
"""Of PEFT's settings those whose adapters have no place here."""
_HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Ways to begin that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ take something out of them."""


def _check_description(model: nn.Module, lora: Lora, folder: Folder, description: Mapping[str, Any]) -> None:
    if description.get("peft_type") != "LORA":
        raise _error(folder, f"its peft_type is {description.get('peft_type')!r}, and only LORA can be read")
    if description.get("bias", "none") != "none" or description.get("lora_bias"):
        raise _error(folder, "it has trained biases, which have no place here")
    for key in _UNKNOWN:
        if description.get(key):
            raise _error(folder, f"its {key} is {description[key]!r}, which has no place here")
    if (init := description.get("init_lora_weights", True)) not in _HARMLESS:
        raise _error(
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
    wanted: dict[str, Any] = {f"lora.{key}": there for key, (here, there) in pairs.items() if here != there}
    flags = [f"--{key} {str(value).lower()}" for key, value in wanted.items()]
    try:
        if targets := _other_targets(model, lora, description):
            flags.append(f"--lora.targets '{targets}'")
            wanted["lora.targets"] = targets
    except ValueError as error:
        raise _error(folder, f"its target_modules are {description.get('target_modules')!r}: {error}") from error
    if flags:
        raise _error(folder, f"its adapters are not those that the settings describe: give {' '.join(flags)}", wanted)


def _other_targets(model: nn.Module, lora: Lora, description: Mapping[str, Any]) -> str:
    """What `lora.targets` must be instead; "" where it means the same layers. Raises ValueError where that is none."""
    targets, excluded = (description.get(key) or [] for key in ("target_modules", "exclude_modules"))
    if targets == ALL_LINEAR and not excluded:
        return "" if lora.all_linear else ALL_LINEAR
    named = [each for each in sites(model, names_there(model)) if each.theirs]
    wanted = [each for each in named if _meant(targets, each.theirs) and not _meant(excluded, each.theirs)]
    if not wanted:
        raise ValueError("no layer of this network is meant by them")
    if {(each.module, each.part) for each in wanted} == {(name, part) for name, _, part, _ in adapted(model)}:
        return ""
    names = _shortest({each.theirs for each in wanted}, {each.theirs for each in named})
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _meant(targets: str | list[str], name: str) -> bool:
    """Whether PEFT means a layer: by its end from a dot on, or, where a text is given, by that as a regular expression."""
    if targets == ALL_LINEAR:
        return True
    if not isinstance(targets, str):
        return any(_ends(name, each) for each in targets)
    try:
        return re.fullmatch(targets, name) is not None
    except re.error as error:
        raise ValueError(f"no regular expression ({error})") from error


def _error(folder: Folder, what: str, allowed: Any = None) -> SettingError:
    """`allowed` are the settings with which it would go, by full names."""
    message = f"lora.init_from is {folder.uri!r}: {what}"
    return SettingError(message, setting="lora.init_from", value=folder.uri, allowed=allowed)
