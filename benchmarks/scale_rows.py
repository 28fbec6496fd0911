"""A row of `benchmarks.scale`: one cost at one number of ranks.

print(Row.HEAD); print(Row("recorder", 8192, calls=512.0, share=0.2))
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Row:
    """One cost, measured at one number of ranks."""

    what: str
    ranks: int
    seconds: float | None = None
    """What it takes, once."""
    bytes: float | None = None
    """What is sent, written or held for it."""
    calls: float | None = None
    """Calls a second that reach the process which all depend on."""
    share: float | None = None
    """What that process has to do, by what one core can do in the same time."""
    note: str = ""

    HEAD: ClassVar[str] = f"{'what':<34} {'ranks':>6} {'seconds':>10} {'MB':>10} {'calls/s':>10} {'of a core':>10}"

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.4f}"
        size = "" if self.bytes is None else f"{self.bytes / 1e6:,.3f}"
        calls = "" if self.calls is None else f"{self.calls:,.1f}"
        share = "" if self.share is None else f"{self.share:.3f}"
        return f"{self.what:<34} {self.ranks:>6,} {seconds:>10} {size:>10} {calls:>10} {share:>10}  {self.note}".rstrip()

    def figures(self) -> dict[str, Any]:
        """The same for programs."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}
