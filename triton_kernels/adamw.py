"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) over all tensors of a group in two launches, in place.

    p <- p (1 - rate decay)
    m <- m + (1 - b1) (g - m);  v <- b2 v + (1 - b2) g^2
    p <- p - rate / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

The order of the operations, each rounded in fp32, is that of torch.optim.AdamW, and so are the bits unless the compiler
contracts a product and a sum into one rounding. Parameters in bfloat16 have fp32 masters, which the same pass updates and
rounds into them, or no masters, and are rounded stochastically (Zamirai et al., 2020).

A first small launch computes the powers of the betas in fp64, once a tensor from its own step count: many GPUs have one fp64
unit for 64 of fp32. The kernels find their tensors through a table of addresses, which is sent to the GPU only when an
address has changed, and then without the host waiting. A CUDA graph can replay the two launches, with the rate that it was
captured with.

If `skip` is 1 on the device nothing changes: so a step that overflowed is skipped without a host synchronisation.

    adamw(parameters, gradients, exp_avgs, exp_avg_sqs, steps, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, jit_varying, tl
from raystride.triton_kernels.launch import launch

_BLOCK_BYTES = 4096
"""Bytes of a program's narrowest stream: 16 for each of the threads of 8 warps, one access of the widest kind."""
_TENSORS = 128
"""Tensors of a program that computes their corrections."""
_TABLES_KEPT = 16
"""Groups of tensors with cached address tables."""

Tensors = Sequence[torch.Tensor]


def adamw_reference(
    parameters: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    skip: torch.Tensor | None = None,
    copies: Tensors = (),
    stochastic: bool = False,
) -> None:
    """Updates parameters and moments in place by PyTorch's own fused operation; arguments as in `adamw`.

    That operation ignores strides: tensors are made contiguous first if layouts differ or have gaps.
    """
    updated = [p.float() for p in parameters] if stochastic else parameters
    groups = (updated, gradients, exp_avgs, exp_avg_sqs)
    own = groups if _have_equal_layouts(groups) else tuple([x.contiguous() for x in group] for group in groups)
    torch.ops.aten._fused_adamw_(
        *(list(group) for group in own), [], list(steps),
        lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        found_inf=skip,
    )  # fmt: skip
    for group, results in zip((groups[0], *groups[2:]), (own[0], *own[2:]), strict=True):
        for x, result in zip(group, results, strict=True):
            if result is not x:
                x.copy_(result)
    copy_rounded(updated, parameters if stochastic else copies, stochastic=stochastic)


def copy_rounded(values: Tensors, copies: Tensors, *, stochastic: bool) -> None:
    """Writes fp32 values into copies of a lower precision, rounded to nearest or stochastically; no copies: nothing."""
    if stochastic:
        for value, copy in zip(values, copies, strict=True):
            copy.copy_(round_stochastically(value))
    elif copies:
        torch._foreach_copy_(list(copies), list(values))


def round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to bfloat16 stochastically and without bias; exact bfloat16 values, infinities and NaN stay.

    A value is rounded up with a probability of its distance to the lower neighbour over the gap, from PyTorch's generator
    of the device.
    """
    # bfloat16 is the upper half of fp32: noise below its last bit carries over as often as the lower half is large.
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    rounded = ((values.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _have_equal_layouts(groups: tuple[Tensors, ...]) -> bool:
    """Returns whether element n in memory is the same in all four groups, without gaps."""
    if all(x.is_contiguous() for group in groups for x in group):
        return True
    whole = all(sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 == x.numel() for x in groups[0])
    return whole and all(len({x.stride() for x in four}) == 1 for four in zip(*groups, strict=True))


@jit
def _one_less_power(BASE: tl.constexpr, exponent, longest):
    """1 - BASE^exponent in fp64, where it keeps its digits for a base near 1; by squaring, as often as `longest` needs."""
    power, square = tl.full(exponent.shape, 1.0, tl.float64), tl.full(exponent.shape, BASE, tl.float64)
    while longest > 0:
        power = tl.where(exponent % 2 == 1, power * square, power)
        square = square * square
        exponent = exponent // 2
        longest = longest // 2
    return 1.0 - power


@jit_varying("tensors")
def _adamw_corrections_kernel(
    steps_ptr, corrections_ptr, tensors, rate, rate_rest, BETA1: tl.constexpr, BETA2: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes rate / (1 - b1^t) and sqrt(1 - b2^t) of each tensor into `corrections` (2, tensors).

    `steps` holds the addresses of the step counts t.
    """
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tensor < tensors
    counts_ptr = tl.load(steps_ptr + tensor, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    steps = tl.load(counts_ptr, mask=inside, other=1.0).to(tl.int32)
    longest = tl.max(steps, 0)
    # In fp64, of which the host could give no argument: the rate comes as two numbers in fp32.
    whole = tl.cast(rate, tl.float64) + tl.cast(rate_rest, tl.float64)
    size = (whole / _one_less_power(BETA1, steps, longest)).to(tl.float32)
    root = tl.sqrt(_one_less_power(BETA2, steps, longest)).to(tl.float32)
    tl.store(corrections_ptr + tensor, size, mask=inside)
    tl.store(corrections_ptr + tensors + tensor, root, mask=inside)


@jit
def _to_pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer of an address, which comes as an integer: a hint tells the compiler that 16 bytes at once are safe."""
    pointer = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _round_stochastically(x, seed, tensor, offsets):
    """`round_stochastically` of fp32, in fp32; Philox (Salmon et al., 2011) draws the noise, by an element's place."""
    low, high = (offsets & 0xFFFFFFFF).to(tl.uint32), (offsets >> 32).to(tl.uint32)
    zero = tl.zeros(offsets.shape, tl.uint32)
    noise = tl.philox(seed, low, high, zero + tensor.to(tl.uint32), zero)[0] >> 16
    rounded = (x.to(tl.int32, bitcast=True) + noise.to(tl.int32)) & -65536
    return tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)


@jit
def _update(
    p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, seed_ptr, tensor, offsets, inside, size, root, keep, beta2, one_less_beta1,
    one_less_beta2, eps,
):  # fmt: skip
    """Elements of one tensor: those of `offsets` that are `inside`, or all of them if that is None."""
    other: tl.constexpr = None if inside is None else 0.0
    p = tl.load(p_ptr + offsets, mask=inside, other=other).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside, other=other).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside, other=other).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=inside, other=other).to(tl.float32)
    m = m + one_less_beta1 * (g - m)
    v = v * beta2 + one_less_beta2 * g * g
    # Rounded to nearest, as PyTorch does; `/` and sqrt of fp32 are approximate in Triton.
    p = p * keep - size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if seed_ptr is not None:
        p = _round_stochastically(p, tl.load(seed_ptr), tensor, offsets)
    tl.store(p_ptr + offsets, p.to(p_ptr.dtype.element_ty), mask=inside)
    tl.store(m_ptr + offsets, m.to(m_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + offsets, v.to(v_ptr.dtype.element_ty), mask=inside)
    if copy_ptr is not None:
        tl.store(copy_ptr + offsets, p.to(copy_ptr.dtype.element_ty), mask=inside)


@jit
def _adamw_kernel(
    addresses_ptr, sizes_ptr, pieces_ptr, corrections_ptr, skip_ptr, seed_ptr, tensors, keep, beta2, one_less_beta1,
    one_less_beta2, eps, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, MOMENT: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one tensor.

    `pieces` (programs, 2): which tensor, which block; `addresses` (6, tensors): p, g, m, v, t, copy, of these types; COPY is
    None without copies.
    """
    if tl.load(skip_ptr) != 0.0:
        return
    tensor = tl.load(pieces_ptr + 2 * tl.program_id(0))
    first = tl.load(pieces_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    offsets, elements = first + tl.arange(0, BLOCK), tl.load(sizes_ptr + tensor)
    p_ptr = _to_pointer(tl.load(addresses_ptr + tensor), PARAMETER, ALIGNED)
    g_ptr = _to_pointer(tl.load(addresses_ptr + tensors + tensor), GRADIENT, ALIGNED)
    m_ptr = _to_pointer(tl.load(addresses_ptr + 2 * tensors + tensor), MOMENT, ALIGNED)
    v_ptr = _to_pointer(tl.load(addresses_ptr + 3 * tensors + tensor), MOMENT, ALIGNED)
    copy_ptr = None
    if COPY is not None:
        copy_ptr = _to_pointer(tl.load(addresses_ptr + 5 * tensors + tensor), COPY, ALIGNED)
    size, root = tl.load(corrections_ptr + tensor), tl.load(corrections_ptr + tensors + tensor)
    # Without a mask, which would allow one element at a time: only a tensor's last block is not whole.
    if first + BLOCK <= elements:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, seed_ptr, tensor, offsets, None, size, root, keep, beta2, one_less_beta1,
            one_less_beta2, eps,
        )  # fmt: skip
    else:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, copy_ptr, seed_ptr, tensor, offsets, offsets < elements, size, root, keep, beta2,
            one_less_beta1, one_less_beta2, eps,
        )  # fmt: skip


class _Group(NamedTuple):
    """The tensors of an update; lists of one length, and one dtype each."""

    parameters: Tensors
    gradients: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    steps: Tensors
    copies: Tensors
    """As many, or none."""

    @property
    def elementwise(self) -> tuple[Tensors, ...]:
        """The lists of tensors of the parameters' shapes."""
        return tuple(tensors for name, tensors in self._asdict().items() if name != "steps" and tensors)


def _check_shapes(group: _Group) -> None:
    """Checks that each tensor has the shape of its parameter. Runs when a table is made, not at every step."""
    parameters = group.parameters
    for name in ("gradients", "exp_avgs", "exp_avg_sqs", "copies"):
        for number, (x, parameter) in enumerate(zip(getattr(group, name), parameters, strict=False)):
            expect("adamw", f"{name}[{number}]", x, shape=parameter.shape, beside=parameters[0])
    for number, step in enumerate(group.steps):
        expect("adamw", f"steps[{number}]", step, shape=(), beside=parameters[0])


@dataclass(frozen=True)
class _Tables:
    """Addresses of a group's tensors, and their partition into blocks; on their device."""

    addresses: torch.Tensor
    """(6, tensors) in int64; zeros for copies that there are not."""
    sizes: torch.Tensor
    pieces: torch.Tensor
    corrections: torch.Tensor
    """Written before each step (2, tensors), in fp32."""
    block: int
    """Elements of a block."""
    aligned: bool


_tables: dict[tuple[int, ...], _Tables] = {}


def _find_tables(group: _Group) -> _Tables:
    """Returns cached tables by addresses and sizes, so that a moved tensor is noticed."""
    addresses = [[x.data_ptr() for x in tensors] for tensors in group]
    key = (*itertools.chain(*addresses), *(x.numel() for tensors in group.elementwise for x in tensors))
    if key not in _tables:
        _check_shapes(group)
        while len(_tables) >= _TABLES_KEPT:
            del _tables[next(iter(_tables))]
        device, parameters = group.parameters[0].device, group.parameters
        block_size = _BLOCK_BYTES // min(tensors[0].itemsize for tensors in group.elementwise)
        counts = torch.tensor([cdiv(x.numel(), block_size) for x in parameters])
        tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
        block = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        sizes = torch.tensor([x.numel() for x in parameters], dtype=torch.int64)
        pieces = torch.stack((tensor, block), dim=1).int()
        aligned = not any(x.data_ptr() % 16 for tensors in group.elementwise for x in tensors)
        rows = [row or [0] * len(parameters) for row in addresses]
        _tables[key] = _Tables(
            addresses=_to_device(torch.tensor(rows, dtype=torch.int64), device),
            sizes=_to_device(sizes, device),
            pieces=_to_device(pieces, device),
            corrections=torch.empty(2, len(counts), device=device),
            block=block_size,
            aligned=aligned,
        )
    return _tables[key]


def _to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies x to a device without the host waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@torch.library.custom_op("raystride::adamw", mutates_args=("parameters", "exp_avgs", "exp_avg_sqs", "copies"))
def _adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    copies: list[torch.Tensor],
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    skip: torch.Tensor,
    seed: torch.Tensor | None,
) -> None:
    tables = _find_tables(_Group(parameters, gradients, exp_avgs, exp_avg_sqs, steps, copies))
    rate = float(np.float32(learning_rate))
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    count = len(parameters)
    launch(
        _adamw_corrections_kernel, (cdiv(count, _TENSORS),),
        tables.addresses[4], tables.corrections, count, rate, learning_rate - rate,
        BETA1=beta1, BETA2=beta2, BLOCK=_TENSORS, num_warps=4,
    )  # fmt: skip
    launch(
        _adamw_kernel, (len(tables.pieces),),
        tables.addresses, tables.sizes, tables.pieces, tables.corrections, skip, seed, count,
        1 - learning_rate * decay, beta2, 1 - beta1, 1 - beta2, eps,
        PARAMETER=kinds[parameters[0].dtype], GRADIENT=kinds[gradients[0].dtype], MOMENT=kinds[exp_avgs[0].dtype],
        COPY=kinds[copies[0].dtype] if copies else None, ALIGNED=tables.aligned, BLOCK=tables.block, num_warps=8,
    )  # fmt: skip


def adamw(
    parameters: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    skip: torch.Tensor | None = None,
    copies: Tensors = (),
    stochastic: bool = False,
) -> None:
    """Updates parameters and moments in place.

    Args:
        parameters: tensors of any shapes, one dtype, one device; fp32 masters if there are copies.
        gradients: of the same shapes, one dtype.
        exp_avgs: first moments m, likewise.
        exp_avg_sqs: second moments v, likewise and of the dtype of m.
        steps: number of updates of each parameter including this one, fp32 scalars on its device.
        learning_rate: of this update.
        betas: decay of the moments, 0 to below 1.
        eps: added to the root of the second moment.
        decay: decoupled weight decay.
        skip: fp32 scalar on the device; if it is 1, nothing is updated; None: 0.
        copies: of the parameters in a lower precision, written by the same pass, rounded to nearest; none: ().
        stochastic: rounds parameters in bfloat16 stochastically, see `round_stochastically`; the kernel draws its seed from
            the same generator.

    Raises:
        ValueError: lists of different lengths, a tensor of another shape than its parameter, several devices, a `skip` that
            is not a scalar, or stochastic rounding of parameters that are not bfloat16 or have copies.
    """
    if not parameters:
        return
    group = _Group(parameters, gradients, exp_avgs, exp_avg_sqs, steps, copies)
    counts = [len(tensors) for tensors in group[:5]]
    if len(set(counts)) > 1:
        raise ValueError(f"adamw: parameters, gradients, moments and steps must be as many, but are {counts}")
    if copies and len(copies) != len(parameters):
        raise ValueError(f"adamw: copies must be as many as the {len(parameters)} parameters or none, but are {len(copies)}")
    if stochastic and (copies or parameters[0].dtype != torch.bfloat16):
        what = "have copies" if copies else f"are {parameters[0].dtype}"
        raise ValueError(f"adamw: stochastic rounding is for bfloat16 parameters without copies, but they {what}")
    expect("adamw", "steps[0]", steps[0], shape=(), beside=parameters[0])
    if skip is not None:
        expect("adamw", "skip", skip, shape=(), beside=parameters[0])
    if not takes_triton("adamw", parameters[0], _unsupported_reason(group)):
        adamw_reference(
            *group[:5],
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            decay=decay,
            skip=skip,
            copies=copies,
            stochastic=stochastic,
        )
        return
    device = parameters[0].device
    # On the device, so that the host does not wait for it.
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=device) if stochastic else None
    skip = torch.zeros((), device=device) if skip is None else skip
    _adamw(*(list(tensors) for tensors in group), learning_rate, *betas, eps, decay, skip, seed)


def _unsupported_reason(group: _Group) -> str:
    if any(x.dtype != torch.float32 for x in group.steps):
        return f"steps in {', '.join(sorted({str(x.dtype) for x in group.steps}))}"
    for name, tensors in group._asdict().items():
        kinds = sorted({str(x.dtype) for x in tensors})
        if len(kinds) > 1:
            return f"{name} of different dtypes, {', '.join(kinds)}"
        if set(kinds) - {"torch.float32", "torch.bfloat16", "torch.float16"}:
            return f"{name} in {kinds[0]}"
    if group.exp_avgs[0].dtype != group.exp_avg_sqs[0].dtype:
        return f"moments of different dtypes, {group.exp_avgs[0].dtype} and {group.exp_avg_sqs[0].dtype}"
    return "" if all(x.is_contiguous() for tensors in group.elementwise for x in tensors) else "a tensor is not contiguous"
