"""Rendered files are checked by the installed programs, and a check that was skipped is reported."""

from pathlib import Path

import pytest

from raystride.pipelines.launch.deploy.validate import check_files
from tests.deploy.rendering import render_for
from tests.errors import rejected


def _write_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one on the PATH; it has `bash` and `cat`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("bash", "cat"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_faulty_scripts_and_yaml_are_refused() -> None:
    with rejected("job.sbatch", "unexpected"):
        check_files("slurm", {"job.sbatch": "#!/bin/bash\nif true; then\n"})
    with rejected("cluster.yaml"):
        check_files("launcher", {"cluster.yaml": "a: [1"})


def test_a_users_lines_in_a_script_are_checked() -> None:
    with rejected("job.sbatch", "matching"):
        check_files("slurm", render_for("slurm", "slurm", gpus=8, slurm={"activate": 'source "venv'}))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("kind", "place", "skipped"), [
    ("compose", "this_machine", "docker compose config --quiet"),
    ("slurm", "slurm", "sbatch --test-only job.sbatch"),
    ("kuberay", "kubernetes", "kubectl apply --dry-run=server -k FOLDER"),
    ("launcher", "aws", "ray up"),
    ("sky", "aws", "sky launch --dryrun task.yaml"),
])  # fmt: skip
def test_a_skipped_check_is_reported_in_one_line(kind: str, place: str, skipped: str) -> None:
    files = render_for(kind, place, nodes=1, gpus=0, preset="lm_python")  # type: ignore[arg-type]
    checked = check_files(kind, files)  # type: ignore[arg-type]
    assert skipped in checked.skipped
    assert "\n" not in checked.skipped
    assert checked.passed[0].endswith(": YAML")


def test_compose_and_kubectl_run_in_the_folder_of_the_files(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_program(programs, "docker", 'echo "$@: $(cat compose.yaml | { read -r first; echo "$first"; })" >> "$LOG"')
    _write_program(programs, "kubectl", 'echo "$@" >> "$LOG"; [[ -f $2/kustomization.yaml ]]')
    log = programs / "log"
    monkeypatch.setenv("LOG", str(log))
    composed = check_files("compose", render_for("compose", "this_machine", nodes=1, preset="lm_python"))
    built = check_files("kuberay", render_for("kuberay", "kubernetes"))
    assert "compose.yaml, network_drive.yaml: docker compose config" in composed.passed
    assert not composed.skipped
    assert built.passed[-1].endswith("kubectl kustomize")
    said = log.read_text()
    assert "compose --file compose.yaml config --quiet: # mine" in said
    assert "compose --file compose.yaml --file network_drive.yaml config --quiet" in said
    assert "kustomize overlays/spot\n" in said


def test_the_message_of_a_program_that_refuses_a_file_is_reported(programs: Path) -> None:
    _write_program(programs, "docker", '[[ $* == *version* ]] && exit 0; echo "services.x: no such field" >&2; exit 1')
    with rejected("compose.yaml", "services.x: no such field"):
        check_files("compose", render_for("compose", "this_machine", nodes=1, preset="lm_python"))
    _write_program(programs, "kubectl", 'echo "must build at directory" >&2; exit 1')
    with rejected("base", "must build at directory"):
        check_files("kuberay", render_for("kuberay", "kubernetes"))
