"""Freed memory that stays with the process, so that each training step finds the pages of the step before.

glibc's malloc returns the top of the heap to the system once enough of it is free. A step on a CPU allocates and frees the
same tensors as the one before; returned in between, each of their pages is a page fault: 6,600 a step of nanoGPT's small
network, a quarter to a third of its time on two cores (28 November 2026). Whether it happens depends on what lies at the top
by chance, so equal runs had two speeds.

    keep_freed_memory()                                       # before the first step
    release_freed_memory()                                    # after the last one, in a process that goes on
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""
LARGEST_MMAP_THRESHOLD = 32 << 20
"""Bytes; glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems, to which its own rule may raise the threshold."""
LARGEST_HEAP, DEFAULT_TOP_PAD = 2 * LARGEST_MMAP_THRESHOLD, 128 << 10
"""Bytes; glibc's HEAP_MAX_SIZE, the size of a thread's heaps, and its default padding."""
NEVER = -1
OWN_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
"""Environment variables of mallopt(3) with which a user has set the same."""


def keep_freed_memory() -> None:
    """Keeps freed blocks of up to 32 MiB in this process; larger ones are mapped and unmapped as before.

    Does nothing if the user has set malloc by environment variables, or if the C library is not glibc.
    """
    if _is_set_by_user():
        return
    if mallopt := _find_function("mallopt"):
        # A threshold that is set is fixed, so both must be: mallopt(3), "dynamic mmap threshold".
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, NEVER)
        # Threads other than the main one allocate from heaps of 64 MiB. Whatever the thresholds, an empty one is deleted,
        # unless the padding is as large: heap_trim in glibc's malloc/arena.c.
        mallopt(M_TOP_PAD, LARGEST_HEAP)


def release_freed_memory() -> None:
    """Returns freed memory to the system, now and from now on above 64 MiB, as far as glibc's own rule may go."""
    mallopt, trim = _find_function("mallopt"), _find_function("malloc_trim")
    if mallopt and trim and not _is_set_by_user():
        mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_MMAP_THRESHOLD)
        mallopt(M_TOP_PAD, DEFAULT_TOP_PAD)
        trim(0)


def _is_set_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in OWN_VARIABLES)


def _find_function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows has no such handle
        return None
