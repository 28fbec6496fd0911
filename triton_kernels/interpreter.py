"""Fix of bfloat16 in Triton's interpreter: computed in fp32, rounded to nearest even, as on a GPU.

The interpreter of Triton 3.6 and 3.7 stores bfloat16 as raw 16-bit integers and multiplies and adds those; its cast from
fp32 truncates. Values are then off by up to 1e8. `patch_interpreter` wraps the interpreter's builder: operands become fp32,
results are rounded back. It cannot fix `a * 0 + tl.sum(a)` in bfloat16, so kernels cast to fp32 when they load.

    os.environ["TRITON_INTERPRET"] = "1"; import raystride.triton_kernels.language       # installs it
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CASTS = {"create_fp_ext", "create_fp_trunc", "create_fp_to_fp", "create_fp_to_si", "create_fp_to_ui"}
_FUNCTIONS = ["exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "precise_sqrt", "precise_divf"]
_FUNCTIONS += ["minimumf", "minnumf", "maximumf", "maxnumf", "clampf", "floor", "ceil", "fabs", "fma"]


def bf16_to_fp32(raw: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Converts bfloat16 raw bits to fp32 values."""
    return (np.ascontiguousarray(raw).astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Converts fp32 values to the raw bits of the nearest bfloat16 numbers, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def patch_interpreter() -> None:
    """Patches the interpreter of this process; a second call changes nothing."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bf16_is_right", False):
        return
    builder.bf16_is_right = True
    arithmetic = {name for name in dir(builder) if name.startswith("create_f")} - _CASTS
    for name in sorted(arithmetic | {f"create_{name}" for name in _FUNCTIONS}):
        if callable(getattr(builder, name, None)):
            setattr(builder, name, _compute_in_fp32(getattr(builder, name)))
    product = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return product(self, _to_fp32(a), _to_fp32(b), d, input_precision, max_num_imprecise_acc)

    builder.create_dot = create_dot
    _patch_casts(builder)


def _patch_casts(builder: Any) -> None:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    plain_cast, plain_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def cast(self: Any, source: Any, target: Any) -> Any:
        source_type, target_type = source.dtype.scalar, target.scalar
        if target_type == tl.bfloat16 and source_type != tl.bfloat16:
            wide = source if source_type == tl.float32 else plain_cast(self, source, tl.float32)
            return TensorHandle(fp32_to_bf16(wide.data), tl.bfloat16)
        if source_type == tl.bfloat16 and target_type != tl.bfloat16:
            wide = _to_fp32(source)
            return wide if target_type == tl.float32 else plain_cast(self, wide, target)
        return plain_cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return plain_fp_to_fp(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast, fp_to_fp


def _is_bf16(value: Any) -> bool:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _to_fp32(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(bf16_to_fp32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _compute_in_fp32(method: Any) -> Any:
    def compute(self: Any, *operands: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if not any(_is_bf16(operand) for operand in operands):
            return method(self, *operands)
        result = method(self, *(_to_fp32(operand) for operand in operands))
        return TensorHandle(fp32_to_bf16(result.data), tl.bfloat16) if result.data.dtype == np.float32 else result

    return compute
