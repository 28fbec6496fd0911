"""Containers without a registry: debootstrap makes a base, buildah the images, podman-compose a cluster, all in one folder.

engine = Engine(folder, key)                               # `folder` outlives the test: base and database are kept there
image = engine.build_raystride()                                 # deploy/Dockerfile over that base
engine.run("podman", "run", "--rm", image, "--version")
engine.remove_containers()                                             # nothing is left but the two kept images
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which

from tests.ray_jobs.jobs import ROOT

TOOLS = ("podman", "buildah", "runc", "debootstrap", "iptables")
"""netavark calls iptables; without it, no container with a network starts."""
NAMES = ("netavark", "aardvark-dns")
"""Programs that set up networks and resolve the containers' names."""
RELEASE = "bookworm"
INCLUDED = "python3,python3-venv,ca-certificates"
CONTAINERS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[network]
network_backend = "netavark"
network_config_dir = "{networks}"
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""
DATABASE = """
FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends postgresql && apt-get clean && \\
    install -d -o postgres -g postgres /var/lib/postgresql/data
COPY entry.sh /entry.sh
USER postgres
ENTRYPOINT ["sh", "/entry.sh"]
"""
"""Replaces the image `postgres`, because no registry can be reached."""
ENTRY = """
set -eu
export PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
data=/var/lib/postgresql/data/db
if [ ! -s $data/PG_VERSION ]; then
    initdb -D $data --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 -E UTF8 --no-sync
    echo "host all all all scram-sha-256" >> $data/pg_hba.conf
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D $data postgres
fi
exec postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/tmp
"""


def find_missing() -> str:
    """Returns what is missing to run containers on this machine, or an empty text."""
    found = [name for name in TOOLS if which(name) is None]
    found += [name for name in NAMES if which(name, path="/usr/lib/podman:/usr/libexec/podman") is None]
    found += [] if importlib.util.find_spec("podman_compose") else ["podman-compose"]
    if os.geteuid():
        found.append("root")
    return ", ".join(found)


class Engine:
    """podman and buildah with their own image store below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        networks = folder / "networks"
        networks.mkdir(exist_ok=True)
        (folder / "containers.conf").write_text(CONTAINERS.format(networks=networks))
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        self.variables = os.environ | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def run(self, *command: str | Path, cwd: Path | None = None, check: bool = True, limit_s: float = 1400) -> str:
        """Runs a command. Returns its output, with `check=False` also its errors; raises AssertionError if it fails."""
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=self.variables, capture_output=True, text=True, timeout=limit_s
        )
        assert not (check and done.returncode), f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout if check else done.stdout + done.stderr

    def build_base(self) -> str:
        """Builds an image of Debian with Python from packages, unless the store has it. Returns its name."""
        name = f"localhost/raystride-base:{_hash(RELEASE, INCLUDED)}"
        if not self._has_image(name):
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                self.run("debootstrap", "--variant=minbase", f"--include={INCLUDED}", RELEASE, place, _debian_mirror())
                for rest in ("var/cache/apt", "var/lib/apt/lists"):
                    shutil.rmtree(Path(place) / rest)
                container = self.run("buildah", "from", "scratch").strip()
                self.run("buildah", "add", "--quiet", container, place, "/")
                self.run("buildah", "commit", "--quiet", "--rm", container, name)
        return name

    def build_database(self) -> str:
        """Builds an image of PostgreSQL on the base, unless the store has it. Returns its name."""
        name = f"localhost/raystride-database:{_hash(RELEASE, INCLUDED, DATABASE, ENTRY)}"
        if not self._has_image(name):
            with tempfile.TemporaryDirectory() as place:
                (Path(place) / "Dockerfile").write_text(DATABASE.format(base=self.build_base()))
                (Path(place) / "entry.sh").write_text(ENTRY)
                self._build(name, place)
        return name

    def build_raystride(self) -> str:
        """Builds the image of `deploy/Dockerfile` from this checkout, with this machine's pip settings. Returns its name."""
        name, (settings, places) = "localhost/raystride:test", read_pip_settings()
        flags = [flag for place in places for flag in ("--volume", f"{place}:{place}:ro")]
        if "find-links" in settings:
            flags += ["--build-arg", "TORCH_INDEX="]
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(settings)
            file.flush()
            flags += ["--secret", f"id=pip_conf,src={file.name}", "--build-arg", f"BASE={self.build_base()}"]
            ignored = ROOT / "deploy" / "Dockerfile.dockerignore"
            self._build(name, ROOT, "--file", ROOT / "deploy" / "Dockerfile", "--ignorefile", ignored, *flags)
        return name

    def _build(self, name: str, place: Path | str, *flags: str | Path) -> None:
        self.run("buildah", "bud", "--layers", "--isolation", "chroot", "--format", "docker", "--tag", name, *flags, place)

    def _has_image(self, image: str) -> bool:
        return not subprocess.run(["podman", "image", "exists", image], env=self.variables).returncode

    def find_leftovers(self) -> list[str]:
        """Returns the containers, pods, networks and volumes that exist, and the mounts below the folder."""
        found = self.run("podman", "ps", "--all", "--quiet").split() + self.run("podman", "volume", "ls", "--quiet").split()
        networks = self.run("podman", "network", "ls", "--format", "{{.Name}}").split()
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [*found, *(set(networks) - {"podman"}), *(place for place in mounted if place.startswith(str(self.folder)))]

    def remove_containers(self) -> None:
        """Ends all containers, and removes everything but the images of base and database, and last week's layers."""
        for command in (
            "podman rm --all --force --time 0",
            "buildah rm --all",
            "podman network prune --force",
            "podman volume prune --force",
            "podman rmi --force localhost/raystride:test",
            "podman image prune --force --filter until=168h",
        ):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run(*command.split(), check=False, limit_s=120)
        # The store mounts its folder on itself.
        subprocess.run(["umount", str(self.folder / "graph" / "overlay")], capture_output=True)


def read_pip_settings() -> tuple[str, list[str]]:
    """Returns this machine's pip settings as the text of one file, and the local folders and files that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings, places = {}, set()
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        values = value.strip("'").split()
        settings[name.split(".", 1)[1]] = " ".join(values)
        for each in values:
            place = each.removeprefix("file://")
            if place.startswith("/") and Path(place).exists():
                # An index's files may be next to its pages.
                places.add(str(Path(place).parent) if each != place else place)
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""]), sorted(places)


def _debian_mirror() -> str:
    """Returns the Debian mirror that this machine uses."""
    file = Path("/etc/apt/sources.list.d/debian.sources")
    lines = file.read_text().splitlines() if file.exists() else []
    named = [line.split()[1] for line in lines if line.startswith("URIs:")]
    return named[0] if named else "http://deb.debian.org/debian"


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
