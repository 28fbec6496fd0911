"""Renders a deployment's files from the Jinja templates in `deploy/`, adds its settings, and writes them to a folder.

files = render_files(deployment)                                # {"job.sbatch": ..., "settings.yaml": ...}
write_files(files, Path("deploy-mine"), overwrite=False)
"""

import math
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raystride.locations import __version__
from raystride.pipelines.config import SettingError
from raystride.pipelines.launch.deploy.plan import TEMPLATES, Deployment

TEMPLATE_SUFFIX = ".j2"
SETTINGS_PATHS = {"kuberay": "base/settings.yaml"}
"""Path of the settings file by kind; `settings.yaml` for the others. kustomize reads nothing above its own folder."""


def render_files(deployment: Deployment) -> dict[str, str]:
    """Renders all files of a deployment. Returns their texts by path, relative to the output folder.

    Files that end in `.j2` are templates; the others are copied. A template that renders to an empty text gives no file.
    `dot.env` becomes `.env`, because wheels leave out hidden files.
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
    environment.filters |= {"sh": _quote_for_shell, "yaml": _quote_for_yaml}
    values = {name: getattr(deployment, name) for name in dir(deployment) if not name.startswith("_")}
    values |= {"version": __version__, "ray_version": version("ray")}
    files = {SETTINGS_PATHS.get(deployment.kind, "settings.yaml"): deployment.settings}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "README.md":
            continue
        if path.suffix != TEMPLATE_SUFFIX:
            files[name] = path.read_text()
        elif (text := environment.get_template(name).render(values)).strip():
            files[re.sub(r"\bdot\.", ".", name.removesuffix(TEMPLATE_SUFFIX))] = text
    return files


def _quote_for_shell(value: object) -> str:
    return shlex.quote(str(value))


def _quote_for_yaml(value: object) -> str:
    """Returns a text, or a list of texts, as quoted YAML on one line: unquoted, `on`, `1e3` and `null` are not texts."""
    return yaml.safe_dump(value, default_style='"', default_flow_style=True, allow_unicode=True, width=math.inf).rstrip("\n")


def write_files(files: dict[str, str], folder: Path, *, overwrite: bool) -> None:
    """Writes the files. Raises SettingError if a file exists with another content, unless `overwrite` is set."""
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
