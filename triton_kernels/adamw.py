"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) over all tensors of a group in one launch, in place.

    p <- p (1 - rate decay)
    m <- m + (1 - b1) (g - m);  v <- b2 v + (1 - b2) g^2
    p <- p - rate / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

The order of the operations, each rounded in fp32, is that of torch.optim.AdamW, and so are the bits where the compiler does
not contract a product and a sum into one rounding. The kernel finds its tensors through a table of addresses, which is sent
to the GPU again only when one has changed.

Where `skip` is 1 nothing changes, which the host need not know: so a step that overflowed is left out.

    adamw(parameters, gradients, exp_avgs, exp_avg_sqs, steps, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, tl
from raystride.triton_kernels.launch import launch

_BLOCK = 1024
"""Elements of a program: with 8 warps a thread has 16 bytes of each of its four streams, in 46 registers on sm_90; with four
times as many it needs 201."""
_TABLES_KEPT = 16
"""Groups of tensors whose addresses are remembered."""

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
) -> None:
    """Updates parameters and moments in place by PyTorch's own fused operation; arguments as `adamw` has them.

    That operation takes memory as it comes: a gradient that lies otherwise than its parameter is laid out anew first, and so
    is what has gaps, or is part of another tensor.
    """
    groups = (parameters, gradients, exp_avgs, exp_avg_sqs)
    own = groups if _lie_alike(groups) else tuple([x.contiguous() for x in group] for group in groups)
    torch.ops.aten._fused_adamw_(
        *(list(group) for group in own), [], list(steps),
        lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        found_inf=skip,
    )  # fmt: skip
    for group, copies in zip((groups[0], *groups[2:]), (own[0], *own[2:]), strict=True):
        for x, copy in zip(group, copies, strict=True):
            if copy is not x:
                x.copy_(copy)


def _lie_alike(groups: tuple[Tensors, ...]) -> bool:
    """Whether element n in memory is the same of all four, and nothing else lies between."""
    if all(x.is_contiguous() for group in groups for x in group):
        return True
    whole = all(sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 == x.numel() for x in groups[0])
    return whole and all(len({x.stride() for x in four}) == 1 for four in zip(*groups, strict=True))


@jit
def _adamw_kernel(
    addresses_ptr, sizes_ptr, pieces_ptr, step_sizes_ptr, roots_ptr, skip_ptr, tensors, keep, beta2, one_less_beta1,
    one_less_beta2, eps, TYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one tensor. `pieces` (programs, 2): which tensor, which block; `addresses` (4, tensors): p, g, m, v."""
    if tl.load(skip_ptr) != 0.0:
        return
    tensor = tl.load(pieces_ptr + 2 * tl.program_id(0))
    offsets = tl.load(pieces_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.load(sizes_ptr + tensor)
    p_address = tl.load(addresses_ptr + tensor)
    g_address = tl.load(addresses_ptr + tensors + tensor)
    m_address = tl.load(addresses_ptr + 2 * tensors + tensor)
    v_address = tl.load(addresses_ptr + 3 * tensors + tensor)
    # Addresses come as integers, of which the compiler cannot know that 16 bytes at a time are safe.
    if ALIGNED:
        p_address, g_address = tl.multiple_of(p_address, 16), tl.multiple_of(g_address, 16)
        m_address, v_address = tl.multiple_of(m_address, 16), tl.multiple_of(v_address, 16)
    p_ptr, g_ptr = p_address.to(tl.pointer_type(TYPE)), g_address.to(tl.pointer_type(TYPE))
    m_ptr, v_ptr = m_address.to(tl.pointer_type(TYPE)), v_address.to(tl.pointer_type(TYPE))
    p = tl.load(p_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    m = m + one_less_beta1 * (g - m)
    v = v * beta2 + one_less_beta2 * g * g
    size, root = tl.load(step_sizes_ptr + tensor), tl.load(roots_ptr + tensor)
    # Rounded to nearest, as PyTorch does; `/` and sqrt of fp32 are approximate in Triton.
    p = p * keep - size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(p_ptr + offsets, p.to(TYPE), mask=inside)
    tl.store(m_ptr + offsets, m.to(TYPE), mask=inside)
    tl.store(v_ptr + offsets, v.to(TYPE), mask=inside)


def _check(groups: tuple[Tensors, ...]) -> None:
    """Each tensor has the shape of its parameter. Asked when a table is made, not at every step."""
    for name, group in zip(("gradients", "exp_avgs", "exp_avg_sqs"), groups[1:], strict=True):
        for number, (x, parameter) in enumerate(zip(group, groups[0], strict=True)):
            expect("adamw", f"{name}[{number}]", x, shape=parameter.shape, beside=groups[0][0])


@dataclass(frozen=True)
class _Tables:
    """Where the tensors of a group lie and how they are cut into blocks; on their device."""

    addresses: torch.Tensor
    sizes: torch.Tensor
    pieces: torch.Tensor
    aligned: bool


_tables: dict[tuple[int, ...], _Tables] = {}


def _find_tables(groups: tuple[Tensors, ...]) -> _Tables:
    """Looked up by addresses and sizes, so a tensor that moved is noticed."""
    key = (*(x.data_ptr() for group in groups for x in group), *(x.numel() for group in groups for x in group))
    if key not in _tables:
        _check(groups)
        while len(_tables) >= _TABLES_KEPT:
            del _tables[next(iter(_tables))]
        device = groups[0][0].device
        addresses = torch.tensor([[x.data_ptr() for x in group] for group in groups], dtype=torch.int64)
        counts = torch.tensor([cdiv(x.numel(), _BLOCK) for x in groups[0]])
        tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
        block = torch.arange(len(tensor)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        sizes = torch.tensor([x.numel() for x in groups[0]], dtype=torch.int64)
        pieces = torch.stack((tensor, block), dim=1).int()
        aligned = not (addresses % 16).any()
        _tables[key] = _Tables(addresses.to(device), sizes.to(device), pieces.to(device), aligned)
    return _tables[key]


@torch.library.custom_op("raystride::adamw", mutates_args=("parameters", "exp_avgs", "exp_avg_sqs"))
def _adamw(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    skip: torch.Tensor,
) -> None:
    tables = _find_tables((parameters, gradients, exp_avgs, exp_avg_sqs))
    # In fp64, since 1 - b^t loses digits in fp32 where b is near 1.
    step = torch.stack(steps).double()
    sizes, roots = (learning_rate / (1 - beta1**step)).float(), (1 - beta2**step).sqrt().float()
    kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[parameters[0].dtype]
    launch(
        _adamw_kernel, (len(tables.pieces),),
        tables.addresses, tables.sizes, tables.pieces, sizes, roots, skip, len(parameters),
        1 - learning_rate * decay, beta2, 1 - beta1, 1 - beta2, eps,
        TYPE=kind, ALIGNED=tables.aligned, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@_adamw.register_fake
def _(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    skip: torch.Tensor,
) -> None:
    return None


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
) -> None:
    """Updates parameters and moments in place.

    Args:
        parameters: tensors of any shapes, one dtype, one device.
        gradients: of the same shapes and dtype.
        exp_avgs: first moments m, likewise.
        exp_avg_sqs: second moments v, likewise.
        steps: for each parameter how many updates it has had with this one, fp32 scalars on its device.
        learning_rate: of this update.
        betas: decay of the moments, 0 to below 1.
        eps: added to the root of the second moment.
        decay: decoupled weight decay.
        skip: where this fp32 scalar on the device is 1, nothing is updated; None: as if it were 0.

    Raises:
        ValueError: not as many of each as parameters, a tensor of another shape than its parameter, several devices, or a
            `skip` that is not a scalar.
    """
    if not parameters:
        return
    groups = (parameters, gradients, exp_avgs, exp_avg_sqs)
    counts = [len(group) for group in (*groups, steps)]
    if len(set(counts)) > 1:
        raise ValueError(f"adamw: parameters, gradients, moments and steps must be as many, but are {counts}")
    expect("adamw", "steps[0]", steps[0], shape=(), beside=parameters[0])
    if skip is not None:
        expect("adamw", "skip", skip, shape=(), beside=parameters[0])
    if takes_triton("adamw", parameters[0], _refusal(groups)):
        tensors = [list(group) for group in (*groups, steps)]
        _adamw(
            *tensors,
            learning_rate,
            *betas,
            eps,
            decay,
            parameters[0].new_zeros((), dtype=torch.float32) if skip is None else skip,
        )
    else:
        adamw_reference(*groups, steps, learning_rate=learning_rate, betas=betas, eps=eps, decay=decay, skip=skip)


def _refusal(groups: tuple[Tensors, ...]) -> str:
    kinds = {x.dtype for group in groups for x in group}
    if len(kinds) > 1:
        return f"tensors of different dtypes, {', '.join(sorted(str(kind) for kind in kinds))}"
    return "" if all(x.is_contiguous() for group in groups for x in group) else "a tensor is not contiguous"
