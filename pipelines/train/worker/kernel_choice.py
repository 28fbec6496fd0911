"""Chooses the operations that a run computes by Triton kernels: with `model.kernels auto` those that are proved.

    bits |= choose_kernels(config, chosen_before, device=device, world=world, storage=storage, log=log)
    # {"kernels": ["adamw float32", "attention bfloat16", ...]}; {} if there is no choice

A kernel is taken if its checks passed on every node's GPU with these versions of driver, Triton and PyTorch and, unless the
run is exact, if it is not slower than PyTorch on the run's own shapes (`kernel_proof`). A run makes its choice once: a
resumed one never takes further kernels, and loses those that are not proved where it goes on. Runs that 0.3 began took all
kernels unproved, and go on with them.
"""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.distributed.collectives import all_reduce_object
from raystride.pipelines.train.worker.kernel_needs import Need, list_needs
from raystride.pipelines.train.worker.kernel_proof import Gpu, describe_gpu, is_slower, kernel_table
from raystride.triton_kernels.configurations import uncovered_reason, unreported_reason
from raystride.triton_kernels.dispatch import EVERYTHING, use_kernels
from raystride.triton_kernels.launch import architecture

UNPROVED = "unproved"
"""The choice of a run that takes all kernels since 0.3 began it."""
_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
Reasons = dict[str, str]
"""Why a kernel is not taken, by the proof's key (`rms_norm bfloat16`); "" for those that are."""


def choose_kernels(
    config: Config,
    chosen_before: Mapping[str, Any] | None,
    *,
    device: torch.device,
    world: int,
    storage: Folder | None,
    log: Callable[[str], None],
    gpu: Gpu | None = None,
) -> dict[str, Any]:
    """Sets the operations that this process runs by kernels; returns the entries of a checkpoint's `bits`. Collective.

    `config.train.precision` is resolved; `chosen_before` has the `bits` and the device of the run's checkpoint, or of the
    run that it repeats. On CPUs there is no choice; `gpu` stands for the facts of this process's GPU.

    Raises:
        SettingError: an exact run would lose a kernel and with it its bits.
        ValueError: `model.kernels` is `triton`, and Triton cannot run.
    """
    choice = config.model.kernels
    if choice == "torch" or (gpu is None and (device.type != "cuda" or uncovered_reason(architecture(device)))):
        use_kernels(choice)
        return {}
    gpu = gpu or describe_gpu(device)
    if text := unreported_reason(".".join(gpu.triton.split(".")[:2])):
        log(text)
    kept = (chosen_before or {}).get("kernels") if (chosen_before or {}).get("device") == "cuda" else []
    if choice == "auto" and kept in (None, UNPROVED):
        use_kernels(choice, EVERYTHING)
        log("Triton for all operations, unproved: this run began so; `raystride check --kernels` checks them on this GPU")
        return {"kernels": UNPROVED}
    needs = list_needs(config)
    reasons = read_reasons(needs, gpu, storage, exact=config.train.exact)
    if world > 1:
        reasons = all_reduce_object(reasons, merge_reasons, dist.new_group(backend="gloo"))
    if choice == "triton":
        use_kernels(choice)
        if unproved := [f"{key} ({reason})" for key, reason in _reasons_of(needs, reasons).items() if reason]:
            log(f"Triton for all operations, as model.kernels says; unproved here: {', '.join(unproved)}")
        return {}
    taken = {key for key, reason in reasons.items() if not reason}
    if kept:
        lost = {key: reasons.get(key) or "not proved here" for key in kept if key not in taken}
        if lost and config.train.exact:
            raise _lost_bits(lost)
        reasons = {key: reason or ("" if key in kept else "this run began without it") for key, reason in reasons.items()}
        taken &= set(kept)
    use_kernels(choice, frozenset((key.split()[0], getattr(torch, key.split()[1])) for key in taken))
    log(describe_choice(_reasons_of(needs, reasons)))
    return {"kernels": sorted(taken)}


def _lost_bits(lost: Mapping[str, str]) -> SettingError:
    text = ", ".join(f"{key} ({reason})" for key, reason in lost.items())
    return SettingError(
        f"train.exact is true, and this run has computed by kernels that are not proved here: {text}. Prove them by "
        "`raystride check --kernels` with the run's settings, or go on where they are",
        setting="train.exact",
        value=True,
    )


def read_reasons(needs: list[Need], gpu: Gpu, storage: Folder | None, *, exact: bool) -> Reasons:
    """Returns for every operation that the run needs, or that is proved here, why its kernel is not taken."""
    with kernel_table(storage, gpu) as table:
        rows = dict(table)
    general = {key: _wrong(row) for key, row in rows.items() if "," not in key and len(key.split()) == 2}
    for need in needs:
        reason = general.get(need.key, "not proved yet")
        own = rows.get(need.own_key) if need.checked else {}
        if not reason and own is None:
            reason = "not proved yet for this shape"
        elif not reason and own:
            reason = _wrong(own) or ("" if exact else _slower(own))
        general[need.key] = general.get(need.key) or reason
    return general


def _wrong(row: Mapping[str, Any]) -> str:
    problem = str(row.get("problem", ""))
    return problem if problem.startswith("not run: ") else f"wrong here, {problem}" if problem else ""


def _slower(row: Mapping[str, Any]) -> str:
    if "triton_s" not in row:
        return "not timed yet"
    share = median(row["triton_s"]) / median(row["torch_s"])
    return f"slower, {share:.2f} times PyTorch's time" if is_slower(row) else ""


def merge_reasons(one: Reasons, other: Reasons) -> Reasons:
    """Returns the reasons of two nodes together: a kernel is taken if neither has one."""
    missing = "not proved on every node"
    return {key: one.get(key, missing) or other.get(key, missing) for key in sorted(one.keys() | other.keys())}


def _reasons_of(needs: list[Need], reasons: Reasons) -> Reasons:
    """Returns those of the operations that the run needs."""
    return {need.key: reasons[need.key] for need in needs}


def describe_choice(reasons: Reasons) -> str:
    """Returns the line of the log: `Triton for nine operations, PyTorch for two (adamw: slower, ...)`."""
    refused = {key.split()[0]: reason for key, reason in reasons.items() if reason}
    taken = {key.split()[0] for key in reasons} - refused.keys()
    names = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    if not taken and all("not proved yet" in reason for reason in refused.values()):
        return (
            f"PyTorch for all operations: no kernel is proved on this GPU yet ({', '.join(refused)}); the next start goes "
            "on proving, `raystride check --kernels` does it ahead"
        )
    described = f"Triton for {_count(len(taken))} operation{'s' if len(taken) != 1 else ''}"
    return described + (f", PyTorch for {_count(len(refused))} ({names})" if refused else "")


def _count(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)
