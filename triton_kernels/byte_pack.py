"""Byte tokenization on the device: concatenated documents become a padded batch or one packed sequence of ids.

A byte b becomes the id `first_id` + b. Documents come as one vector of bytes (N), uint8, and offsets (B + 1), int64:
document i is bytes offsets[i] to offsets[i + 1]. So text is transferred to the GPU at one byte a character.

    padded: ids (B, L) and mask (B, L), start and end tokens around each document, cut off or filled up to L
    packed: ids (N + extra), the document and position of each, and the documents' new offsets (B + 1), int32,
            as in `attention_packed`; nothing is cut off, so the size is known without a device synchronisation

    ids, mask = byte_pack(data, offsets, length=512, end_id=256, padding_id=257)
    ids, documents, positions, new_offsets = byte_pack_sequence(data, offsets, end_id=256)
"""

import torch

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit_varying, tl
from raystride.triton_kernels.launch import launch

_BLOCK = 1024
"""Ids of a program."""
NO_TOKEN = -1
"""Value of start_id or end_id for no token."""

Padded = tuple[torch.Tensor, torch.Tensor]
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def byte_pack_reference(
    data: torch.Tensor,
    offsets: torch.Tensor,
    *,
    length: int,
    start_id: int = NO_TOKEN,
    end_id: int = NO_TOKEN,
    padding_id: int = 0,
    first_id: int = 0,
) -> Padded:
    """Returns ids (B, length) and their mask, by indexing. A truncated document keeps its end token, as its last id."""
    starts, sizes = offsets[:-1, None], offsets.diff()[:, None]
    begin, end = int(start_id != NO_TOKEN), int(end_id != NO_TOKEN)
    room = max(0, length - begin - end)
    kept = sizes.clamp(max=room)
    columns = torch.arange(length, device=data.device)[None]
    inside = (columns >= begin) & (columns < begin + kept)
    ids = torch.full((sizes.shape[0], length), padding_id, dtype=torch.int64, device=data.device)
    if data.numel():
        where = (starts + columns - begin).clamp(0, data.numel() - 1)
        ids = torch.where(inside, data[where].to(torch.int64) + first_id, ids)
    if begin:
        ids[:, :1] = start_id
    if end:
        ids = torch.where(columns == begin + kept, end_id, ids)
    return ids, columns < begin + kept + end


def byte_pack_sequence_reference(
    data: torch.Tensor, offsets: torch.Tensor, *, start_id: int = NO_TOKEN, end_id: int = NO_TOKEN, first_id: int = 0
) -> Packed:
    """Returns ids (total), the document and position of each, and the new offsets (B + 1), by indexing."""
    begin, end = int(start_id != NO_TOKEN), int(end_id != NO_TOKEN)
    documents = offsets.shape[0] - 1
    new_offsets = offsets - offsets[:1] + torch.arange(documents + 1, device=data.device) * (begin + end)
    places = torch.arange(data.shape[0] + documents * (begin + end), device=data.device)
    document = torch.searchsorted(new_offsets[1:], places, right=True)
    position = places - new_offsets[document]
    size = offsets.diff()[document]
    where = offsets[document] + position - begin
    ids = data[where.clamp(0, max(0, data.shape[0] - 1))].to(torch.int64) + first_id if data.numel() else places
    ids = torch.where(position < begin, start_id, torch.where(position >= begin + size, end_id, ids))
    return ids, document.int(), position.int(), new_offsets.int()


@jit_varying("size")
def _byte_pack_kernel(
    data_ptr, offsets_ptr, ids_ptr, mask_ptr, size, length, start_id, end_id, padding_id, first_id,
    BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    document = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(offsets_ptr + document)
    kept = tl.minimum(tl.load(offsets_ptr + document + 1) - start, tl.maximum(length - BEGIN - END, 0))
    inside = (columns >= BEGIN) & (columns < BEGIN + kept)
    # Offsets that point outside find the nearest byte, as in the reference, and never another's memory.
    place = tl.maximum(tl.minimum(start + columns - BEGIN, size - 1), 0)
    byte = tl.load(data_ptr + place, mask=inside & (size > 0), other=0).to(tl.int64)
    ids = tl.where(inside, byte + first_id, padding_id)
    if END:
        ids = tl.where(columns == BEGIN + kept, end_id, ids)
    if BEGIN:
        ids = tl.where(columns == 0, start_id, ids)
    tl.store(ids_ptr + document * length + columns, ids, mask=columns < length)
    tl.store(mask_ptr + document * length + columns, columns < BEGIN + kept + END, mask=columns < length)


@jit_varying("length", "total", "documents", "halvings")
def _byte_pack_sequence_kernel(
    data_ptr, offsets_ptr, ids_ptr, documents_ptr, positions_ptr, length, total, documents, halvings, start_id, end_id,
    first_id, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each place looks up its document by bisection: the last one whose new offset is not beyond it."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < total
    first = tl.load(offsets_ptr)
    low, high = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64) + documents
    for _ in range(halvings):
        middle = (low + high) // 2
        found = tl.load(offsets_ptr + middle, mask=inside, other=0) - first + middle * (BEGIN + END)
        goes_right = (found <= places) & (middle < documents)
        low, high = tl.where(goes_right, middle, low), tl.where(goes_right, high, middle)
    start = tl.load(offsets_ptr + low, mask=inside, other=0)
    size = tl.load(offsets_ptr + low + 1, mask=inside, other=0) - start
    position = places - (start - first + low * (BEGIN + END))
    is_byte = (position >= BEGIN) & (position < BEGIN + size)
    place = tl.maximum(tl.minimum(start + position - BEGIN, length - 1), 0)
    ids = tl.load(data_ptr + place, mask=inside & is_byte & (length > 0), other=0).to(tl.int64) + first_id
    ids = tl.where(position < BEGIN, start_id, tl.where(position >= BEGIN + size, end_id, ids))
    tl.store(ids_ptr + places, ids, mask=inside)
    tl.store(documents_ptr + places, low.to(tl.int32), mask=inside)
    tl.store(positions_ptr + places, position.to(tl.int32), mask=inside)


@torch.library.custom_op("raystride::byte_pack", mutates_args=())
def _byte_pack(
    data: torch.Tensor, offsets: torch.Tensor, length: int, start_id: int, end_id: int, padding_id: int, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    documents = offsets.shape[0] - 1
    ids = torch.empty(documents, length, dtype=torch.int64, device=data.device)
    mask = torch.empty(documents, length, dtype=torch.bool, device=data.device)
    launch(
        _byte_pack_kernel, (documents, cdiv(length, _BLOCK)), data.contiguous(), offsets.contiguous(), ids, mask,
        len(data), length, start_id, end_id, padding_id, first_id,
        BEGIN=int(start_id != NO_TOKEN), END=int(end_id != NO_TOKEN), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return ids, mask


@_byte_pack.register_fake
def _(
    data: torch.Tensor, offsets: torch.Tensor, length: int, start_id: int, end_id: int, padding_id: int, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (offsets.shape[0] - 1, length)
    return data.new_empty(shape, dtype=torch.int64), data.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("raystride::byte_pack_sequence", mutates_args=())
def _byte_pack_sequence(
    data: torch.Tensor, offsets: torch.Tensor, start_id: int, end_id: int, first_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    begin, end, documents = int(start_id != NO_TOKEN), int(end_id != NO_TOKEN), offsets.shape[0] - 1
    total = data.shape[0] + documents * (begin + end)
    ids = torch.empty(total, dtype=torch.int64, device=data.device)
    document, position = torch.empty_like(ids, dtype=torch.int32), torch.empty_like(ids, dtype=torch.int32)
    launch(
        _byte_pack_sequence_kernel, (cdiv(total, _BLOCK),), data.contiguous(), offsets.contiguous(), ids, document, position,
        len(data), total, documents, max(1, documents.bit_length()), start_id, end_id, first_id,
        BEGIN=begin, END=end, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    new_offsets = offsets - offsets[:1] + torch.arange(documents + 1, device=data.device) * (begin + end)
    return ids, document, position, new_offsets.int()


@_byte_pack_sequence.register_fake
def _(
    data: torch.Tensor, offsets: torch.Tensor, start_id: int, end_id: int, first_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    extra = int(start_id != NO_TOKEN) + int(end_id != NO_TOKEN)
    total = data.shape[0] + (offsets.shape[0] - 1) * extra
    ids = data.new_empty((total,), dtype=torch.int64)
    small = torch.empty_like(ids, dtype=torch.int32)
    return ids, small, torch.empty_like(small), torch.empty_like(offsets, dtype=torch.int32)


def byte_pack(
    data: torch.Tensor,
    offsets: torch.Tensor,
    *,
    length: int,
    start_id: int = NO_TOKEN,
    end_id: int = NO_TOKEN,
    padding_id: int = 0,
    first_id: int = 0,
) -> Padded:
    """Returns ids (B, length), int64, and a mask (B, length), False for padding.

    A document that does not fit between its start and end tokens is truncated; both tokens stay.

    Raises:
        ValueError: `length` has no room for the start and end tokens, or data and offsets have other types.
    """
    _check(data, offsets)
    least = int(start_id != NO_TOKEN) + int(end_id != NO_TOKEN)
    if length < max(least, 1):
        raise ValueError(f"byte_pack: length {length} has no room for {least} start and end tokens")
    tokens = {"start_id": start_id, "end_id": end_id, "padding_id": padding_id, "first_id": first_id}
    if takes_triton("byte_pack", data, dtypes=(torch.uint8,)):
        padded: Padded = _byte_pack(data, offsets, length, **tokens)
        return padded
    return byte_pack_reference(data, offsets, length=length, **tokens)


def byte_pack_sequence(
    data: torch.Tensor, offsets: torch.Tensor, *, start_id: int = NO_TOKEN, end_id: int = NO_TOKEN, first_id: int = 0
) -> Packed:
    """Returns ids (total), int64; the document and position of each, int32; and the new offsets (B + 1), int32.

    The offsets must start at 0 and end at N: every byte belongs to a document.

    Raises:
        ValueError: data or offsets have other types.
    """
    _check(data, offsets)
    if takes_triton("byte_pack", data, dtypes=(torch.uint8,)):
        packed: Packed = _byte_pack_sequence(data, offsets, start_id, end_id, first_id)
        return packed
    return byte_pack_sequence_reference(data, offsets, start_id=start_id, end_id=end_id, first_id=first_id)


def _check(data: torch.Tensor, offsets: torch.Tensor) -> None:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise ValueError(f"byte_pack: data must be a vector of uint8, not {data.dtype} {tuple(data.shape)}")
    expect("byte_pack", "offsets", offsets, beside=data)
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"byte_pack: offsets must be a vector of int64, one more than documents, not {offsets.dtype}")
