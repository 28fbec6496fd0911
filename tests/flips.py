"""Single flipped bits of stored files, as disks and memory make them."""


def flip(data: bytes, bit: int) -> bytes:
    """Returns the bytes with one bit turned, counted from the first byte's lowest."""
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)
