"""The versions that tests run with: those that are installed, and the lowest that `pyproject.toml` admits.

python -m tests.versions                          # prints what is installed of the libraries that matter
python -m tests.versions --lowest > lowest.txt    # `make test-oldest`: constraints for pip
"""

import argparse
import platform
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

SHOWN = ("ray", "torch", "triton", "mlflow", "transformers", "deepspeed", "datasets", "pyarrow", "numpy", "peft", "trl")


def lowest_versions(project: dict[str, Any]) -> dict[str, Version]:
    """Returns by distribution the highest of its lower bounds, over the dependencies and all extras."""
    found: dict[str, Version] = {}
    for line in [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]:
        requirement = Requirement(line)
        for bound in requirement.specifier:
            if bound.operator == ">=":
                found[requirement.name] = max(Version(bound.version), found.get(requirement.name, Version("0")))
    return found


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that matter, where they are installed."""
    found = {"python": platform.python_version()}
    for name in SHOWN:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Prints one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowest", action="store_true")
    if parser.parse_args().lowest:
        project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
        for name, lowest in sorted(lowest_versions(project).items()):
            # The first release of a series may have a third number: nvidia-ml-py 12.560 is 12.560.30.
            print(f"{name}=={lowest if lowest.release[1:] else f'{lowest}.0'}.*")
    else:
        print("testing with", ", ".join(f"{name} {each}" for name, each in installed_versions().items()))


if __name__ == "__main__":
    main()
