"""One file an operation: formula, reference, kernels, registration, public function, in that order."""

import os


def interpreting() -> bool:
    """Whether the environment asks for Triton's interpreter; Triton reads it once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")
