"""The operations that a run calls, with its widths, heads and lengths: what its kernels are checked and timed on.

for need in list_needs(config): print(need.key, need.own_key)   # "gelu bfloat16", "gelu 8192x3072, bfloat16"
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

from raystride.model.shape import head_size, hidden_width, is_gated, is_rotated, rotary_size
from raystride.pipelines.config import Config
from raystride.pipelines.config.combinations import DECODERS
from raystride.pipelines.config.optimizers import OPTIMIZERS
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.triton_kernels.adamw import adamw, adamw_reference
from raystride.triton_kernels.attention import attention, attention_reference
from raystride.triton_kernels.attention_packed import attention_packed, attention_packed_reference
from raystride.triton_kernels.device_checks import Call, Shapes, parameters_after_step
from raystride.triton_kernels.geglu import geglu, geglu_reference
from raystride.triton_kernels.gelu import gelu, gelu_reference
from raystride.triton_kernels.layer_norm import add_layer_norm, add_layer_norm_reference, layer_norm, layer_norm_reference
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from raystride.triton_kernels.relu import relu, relu_reference
from raystride.triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from raystride.triton_kernels.rope import rope, rope_reference
from raystride.triton_kernels.swiglu import swiglu, swiglu_reference

MAX_ROWS = 1 << 14
"""Maximum number of tokens of a timed batch."""
MAX_CHECKED_ROWS, MAX_CHECKED_TOKENS, MAX_CHECKED_WORDS = 1000, 512, 1 << 15
"""Maximum of rows, tokens of attention and words of a checked call, which PyTorch computes in float64 as well."""

Function = Callable[..., torch.Tensor]


class Need(NamedTuple):
    """An operation that a run calls in a dtype."""

    operation: str
    dtype: torch.dtype
    checked: Call | None = None
    """A call with the run's widths and heads, and few rows; None: the general checks are all there is."""
    timed: Shapes | None = None
    """The run's own shapes."""

    @property
    def key(self) -> str:
        """The table's key of the general checks."""
        return proof_key(self.operation, self.dtype)

    @property
    def own_key(self) -> str:
        """The key of the run's own shape."""
        sizes = " ".join("x".join(map(str, shape)) for shape in self.timed or self.checked[3]) if self.checked else ""
        return f"{self.checked[0]} {sizes}, {dtype_name(self.dtype)}" if self.checked else ""


def proof_key(operation: str, dtype: torch.dtype) -> str:
    """Returns the table's key of an operation's general checks in a dtype."""
    return f"{operation} {dtype_name(dtype)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def list_needs(config: Config) -> list[Need]:
    """Returns the operations that a run calls, in its dtypes. `config.train.precision` is resolved."""
    model, optimizer = config.model, config.optimizer
    stream = torch.bfloat16 if config.train.precision == "pure_bf16" else torch.float32
    matmul = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision, stream)
    matrices: Shapes = [(4 * model.hidden_size, model.hidden_size)] * 4
    ours, reference = (partial(parameters_after_step, update) for update in (adamw, adamw_reference))
    needs = [_own("adamw", stream, ours, reference, matrices)] if OPTIMIZERS[optimizer.kind].uses_adamw else []
    if config.task == "images":
        return needs + [Need(name, matmul) for name in ("convolution", "relu", "mse")]
    if config.task not in BUILT_IN_TASKS:
        return needs
    context = model.context
    samples = max(1, min(config.train.slot_samples, MAX_ROWS // context))
    rows = samples * context
    needs += _norm_needs(model.architecture == "llama", rows, model.hidden_size, stream)
    gated = is_gated(model)
    llama_silu = model.architecture == "llama" and model.gate != "gelu"
    gelus = model.architecture in ("gpt2", "bert")
    pair: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = (
        ((swiglu, swiglu_reference) if llama_silu else (geglu, geglu_reference))
        if gated
        else ((gelu, gelu_reference) if gelus else (relu, relu_reference))
    )
    needs.append(_own(pair[0].__name__, matmul, *pair, [(rows, hidden_width(model))] * (2 if gated else 1)))
    heads, groups, size = model.heads, model.kv_heads or model.heads, head_size(model)
    if is_rotated(model) and rotary_size(model) == size:
        turned: Shapes = [(samples, count, context, size) for count in (heads, groups)]
        needs.append(
            _own("rope", matmul, partial(_turn, rope), partial(_turn, rope_reference), turned, MAX_CHECKED_TOKENS, axis=2)
        )
    needs += _attention_needs(config, samples, heads, groups, size, matmul)
    if config.task == "preference":
        needs.append(Need("linear_log_probabilities", matmul))
    elif config.task in DECODERS or config.task == "translation":
        words = config.tokenizer.vocabulary_size
        shapes: Shapes = [(rows, model.hidden_size), (words, model.hidden_size)]
        own = _own("linear_cross_entropy", matmul, _sum_loss_ours, _sum_loss_reference, shapes)
        checked: Shapes = [
            (min(rows, MAX_CHECKED_TOKENS), model.hidden_size),
            (min(words, MAX_CHECKED_WORDS), model.hidden_size),
        ]
        assert own.checked is not None
        needs.append(own._replace(checked=(*own.checked[:3], checked)))
    if config.task == "classification" and config.tokenizer.kind == "bytes":
        needs.append(Need("byte_pack", torch.uint8))
    if config.scaling.context > 1:
        needs.append(Need("attention_context", matmul))
    if config.scaling.tensor > 1:
        needs.append(Need("linear_cross_entropy_sharded", matmul))
    return needs


def _own(
    operation: str,
    dtype: torch.dtype,
    ours: Function,
    reference: Function,
    shapes: Shapes,
    most: int = MAX_CHECKED_ROWS,
    *,
    axis: int = 0,
    rules: str = "",
) -> Need:
    """Returns a need with the run's shapes; the checked call has at most `most` entries along `axis` of matrices."""
    checked = [(*shape[:axis], min(shape[axis], most), *shape[axis + 1 :]) if len(shape) > 1 else shape for shape in shapes]
    checked = [(1, *shape[1:]) if axis else shape for shape in checked]
    return Need(operation, dtype, (f"{operation}{rules}", ours, reference, checked), shapes)


def _norm_needs(is_rms: bool, rows: int, width: int, dtype: torch.dtype) -> list[Need]:
    matrix, row = (rows, width), (width,)
    plain, added = ("rms_norm", "add_rms_norm") if is_rms else ("layer_norm", "add_layer_norm")
    alone = (rms_norm, rms_norm_reference) if is_rms else (layer_norm, layer_norm_reference)
    with_sum = (add_rms_norm, add_rms_norm_reference) if is_rms else (add_layer_norm, add_layer_norm_reference)
    weights = [row] if is_rms else [row, row]
    joined = partial(_concat, with_sum[0]), partial(_concat, with_sum[1])
    return [
        _own(plain, dtype, *alone, [matrix, *weights]),
        _own(added, dtype, *joined, [matrix, matrix, *weights]),
    ]


def _attention_needs(config: Config, samples: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Need]:
    causal, softcap, context = config.task != "classification", config.model.softcap, config.model.context
    rules = (" causal" if causal else "") + (f" cap {softcap:g}" if softcap else "")
    if config.train.packing == "none":
        shapes: Shapes = [(samples, count, context, size) for count in (heads, groups, groups)]
        ours, reference = (
            partial(function, causal=causal, softcap=softcap) for function in (attention, attention_reference)
        )
        return [_own("attention", dtype, ours, reference, shapes, MAX_CHECKED_TOKENS, axis=2, rules=rules)]
    shapes = [(samples * context, count, size) for count in (heads, groups, groups)]
    ours, reference = (
        partial(_attend_packed, function, causal, softcap, min(context, MAX_CHECKED_TOKENS))
        for function in (attention_packed, attention_packed_reference)
    )
    packed = _own("attention_packed", dtype, ours, reference, shapes, MAX_CHECKED_TOKENS, rules=rules)
    return [packed, Need("attention", dtype)]  # validation and text are not packed


def _concat(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(function(*tensors), -1)


def _turn(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.cat(function(q, k, *_angles(q.shape[2], q.shape[3], q.device)), 1)


@cache
def _angles(tokens: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens, dtype=torch.float32, device=device)[:, None]
    angles = positions / 10000 ** (torch.arange(0, size, 2, device=device) / size)
    return angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)


def _attend_packed(
    function: Callable[..., torch.Tensor],
    causal: bool,
    softcap: float,
    length: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    offsets = torch.tensor([*range(0, len(q), length), len(q)], dtype=torch.int32, device=q.device)
    return function(q, k, v, offsets, offsets, causal=causal, softcap=softcap)


def _sum_loss_ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, _targets(x, weight))[0]


def _sum_loss_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy_reference(x, weight, _targets(x, weight))[0]


def _targets(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) * 7919 % len(weight)
