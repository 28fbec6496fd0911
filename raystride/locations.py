"""Version and paths of this installation: a checkout, a package that Ray has unpacked, or an installed wheel."""

from pathlib import Path

__version__ = "0.4.0.dev1"
"""Between two releases the next one's with `.devN`."""

PACKAGE = Path(__file__).parent
"""The package `raystride`, with configurations, deployment templates and all modules."""
ROOT = PACKAGE.resolve().parent
"""The package's parent folder, with all links resolved."""
