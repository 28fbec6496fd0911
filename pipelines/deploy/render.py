"""From a deployment to files: Jinja's templates of `deploy/`, and the settings beside them.

written = write(deployment, Path("deploy-mine"), overwrite=False)    # {"job.sbatch": ..., "settings.yaml": ...}
"""

import math
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import raystride
from raystride.pipelines.config import SettingError
from raystride.pipelines.deploy.plan import TEMPLATES, Deployment

ENDING = ".j2"
SETTINGS = {"kuberay": "base/settings.yaml"}
"""Where the settings go, where that is not `settings.yaml`: kustomize reads nothing above its own folder."""


def rendered(deployment: Deployment) -> dict[str, str]:
    """Every file of the kind, by its path in the folder; what ends in `.j2` is filled in.

    A template that comes out empty is no file. `dot.env` becomes `.env`: wheels leave out hidden files.
    """
    folder = TEMPLATES / deployment.kind
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - YAML and shell, not HTML: see the filters
    )
    environment.filters |= {"sh": _for_shell, "yaml": _for_yaml}
    values = {name: getattr(deployment, name) for name in dir(deployment) if not name.startswith("_")}
    values |= {"version": raystride.__version__, "ray_version": version("ray")}
    files = {SETTINGS.get(deployment.kind, "settings.yaml"): deployment.settings}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "README.md":
            continue
        if path.suffix != ENDING:
            files[name] = path.read_text()
        elif (text := environment.get_template(name).render(values)).strip():
            files[re.sub(r"\bdot\.", ".", name.removesuffix(ENDING))] = text
    return files


def _for_shell(value: object) -> str:
    return shlex.quote(str(value))


def _for_yaml(value: object) -> str:
    """Returns a text, or a list of texts, as YAML on one line, in quotes: bare, `on`, `1e3` and `null` are no texts."""
    return yaml.safe_dump(value, default_style='"', default_flow_style=True, allow_unicode=True, width=math.inf).rstrip("\n")


def write(files: dict[str, str], folder: Path, *, overwrite: bool) -> None:
    """Writes the files. Raises SettingError where one is there that somebody has changed, unless it may be replaced."""
    changed = [name for name, text in files.items() if (file := folder / name).exists() and file.read_text() != text]
    if changed and not overwrite:
        raise SettingError(
            f"output is {str(folder)!r}: {', '.join(changed)} there would be replaced; give another --output, or "
            "--overwrite true",
            setting="output",
            value=str(folder),
        )
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
