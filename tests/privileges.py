"""What root may and others may not: Linux gives it to a thread by capabilities, and takes it from one.

with bound_by_permissions(): path.read_text()       # PermissionError, where its mode says so
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Bits of the capabilities by which root reads and writes what no permission allows."""


def _effective(clear: int = 0, put: int = 0) -> int:
    """Changes bits of this thread's effective capabilities; returns those of the lower half as they were."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    before = data[0]
    data[0] = (before & ~clear) | put
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")
    return int(before)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Has this thread, and those that it starts in the block, bound by files' permissions as any user is."""
    if os.geteuid() != 0:
        yield
        return
    rights = 1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH
    before = _effective(clear=rights)
    try:
        yield
    finally:
        _effective(put=before & rights)
