"""What this cluster has, and whether this configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Config, SettingError  # noqa: E402
from pipelines.config.parse import fail, parse  # noqa: E402


def main(arguments: list[str]) -> int:
    """Checks; returns 0 where all passed, 3 where something did not."""
    try:
        parsed = parse(Config, arguments, program="check.py", description="See whether a configuration will run here.")
    except SettingError as error:
        return fail(error)
    from pipelines.launch.driver import run_check

    return run_check(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
