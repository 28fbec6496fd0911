"""Triton kernels, one file an operation: formula, reference, kernels, registration, public function, in that order."""

import os

if not __name__.startswith("raystride."):
    raise ImportError(f"import raystride.{__name__}, not {__name__}: under two names all of it would be loaded twice")


def interpreting() -> bool:
    """Returns whether the environment selects Triton's interpreter; Triton reads it once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
