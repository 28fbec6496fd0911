"""Settings of `raystride deploy`: how much of which place a run is to have, and what a place is.

place = configured(Place, "deploy/places/slurm_two_nodes_of_eight.yaml").settings
request = Deploy(nodes=2, gpus_per_node=8, place="slurm_two_nodes_of_eight")
"""

import re
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from raystride.pipelines.config.run import Finished
from raystride.pipelines.config.section import Section, setting

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that no line of a script or a YAML file may hold."""


@dataclass(frozen=True, kw_only=True)
class Deploy(Section):
    """How much of which place the run is to have, and where the files go."""

    name: ClassVar[str] = ""

    place: str = setting("")
    """Name of a description in `deploy/places`, or a YAML file of your own; empty: the one that the kind begins with."""
    nodes: int = setting(1, at_least=1, at_most=100_000)
    """Machines, or containers that stand for them."""
    gpus_per_node: int = setting(0, at_least=0, at_most=1024)
    """GPUs of each; 0: CPUs alone."""
    output: str = setting("")
    """Folder for the files; empty: `deploy-` and the run's name."""
    overwrite: bool = setting(False)
    """Write over files in that folder that are not as they would be written."""
    job: Literal["train", "sweep"] = setting("train")
    """What is run there."""
    array: int = setting(0, at_least=0, at_most=100_000)
    """On Slurm, cut a grid sweep into so many jobs of one array, each of which tries its share; 0: one job."""


@dataclass(frozen=True, kw_only=True)
class DeployServe(Finished):
    """Which run's model is to be served on GPUs, by Ray Serve LLM."""

    place: str = setting("")
    """Name of a description in `deploy/places`, or a YAML file of your own, whose storage has the run; empty: `storage`."""
    gpus: int = setting(1, at_least=1, at_most=64)
    """GPUs of each copy of the model, over which it is cut."""
    accelerator: str = setting("")
    """Kind of GPU as Ray calls it, such as `H100`; empty: any."""
    least_replicas: int = setting(1, at_least=0, at_most=10_000)
    """Copies of the model that are always there; 0: none while nobody asks."""
    most_replicas: int = setting(1, at_least=1, at_most=10_000)
    """Copies when many ask."""
    port: int = setting(8000, at_least=1, at_most=65535)
    """Port on the head's own address, 127.0.0.1."""
    output: str = setting("")
    """Folder for the file; empty: `serve-` and the run's name."""
    overwrite: bool = setting(False)
    """Write over a file there that is not as it would be written."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, no run is named, or there are fewer copies than always."""
        super().__post_init__()
        if self.least_replicas > self.most_replicas:
            raise self.error("least_replicas", f"must be at most most_replicas, {self.most_replicas}")


class _PlaceSection(Section):
    """Settings of a place, which become lines of scripts and of YAML files: texts of one line each."""

    def __post_init__(self) -> None:
        """Raises SettingError as sections do, and for a text with a line break or another control character."""
        super().__post_init__()
        for item in fields(self):
            value = getattr(self, item.name)
            for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                if CONTROL.search(text):
                    raise self.error(item.name, "must be one line, without control characters")

    def _check_pattern(self, key: str, pattern: str, rule: str) -> None:
        """Raises SettingError if a field is not empty and does not match a regular expression."""
        if (value := getattr(self, key)) and not re.fullmatch(pattern, value):
            raise self.error(key, rule)


@dataclass(frozen=True, kw_only=True)
class SlurmPlace(_PlaceSection):
    """What Slurm wants to know."""

    name: ClassVar[str] = "slurm"

    partition: str = setting("")
    """Partition; empty: the cluster's default."""
    account: str = setting("")
    """Account that pays; empty: yours."""
    qos: str = setting("")
    """Quality of service; empty: the default."""
    time_limit: str = setting("24:00:00")
    """Of one start of the job, as Slurm writes times; the job saves before it and queues again."""
    activate: str = setting("")
    """Shell line that makes `raystride` callable on every node, such as `source /shared/venv/bin/activate`."""
    modules: tuple[str, ...] = setting(())
    """Environment modules to load first."""
    extra: tuple[str, ...] = setting(())
    """More options of sbatch, such as `--constraint=h100`."""
    requeues: int = setting(100, at_least=0)
    """Times that the job queues again at its time limit."""
    tls: bool = setting(False)
    """Have Ray's processes on all nodes talk by TLS alone, with certificates that each start of the job makes for itself."""

    def __post_init__(self) -> None:
        """Raises SettingError for what would be several words in a line of the batch script."""
        super().__post_init__()
        for key in ("partition", "account", "qos"):
            self._check_pattern(key, r"[^\s#'\"]+", "must be a name without spaces and quotes")
        if faulty := [option for option in self.extra if not option.startswith("-")]:
            raise self.error("extra", f"must be options of sbatch, which begin with `-`, not {faulty[0]!r}")


@dataclass(frozen=True, kw_only=True)
class KubernetesPlace(_PlaceSection):
    """What Kubernetes wants to know."""

    name: ClassVar[str] = "kubernetes"

    namespace: str = setting("raystride")
    """Namespace that everything lies in."""
    storage_class: str = setting("")
    """Class of a volume that several nodes may write (ReadWriteMany), where `storage` is a folder."""
    storage_gib: int = setting(500, at_least=1)
    """Size of that volume."""
    service_account: str = setting("raystride")
    """Account that the pods run as; with object stores, bound to a role that may write them."""
    queue: str = setting("")
    """Kueue's local queue; empty: none."""
    spot: bool = setting(False)
    """Put the workers on nodes that may be taken away, and tolerate their taint."""
    secret: str = setting("")
    """Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID; empty: none."""
    role: str = setting("")
    """Role that the account stands for: `arn:aws:iam::...` on EKS, an account of Google's on GKE; empty: none."""
    node_labels: tuple[str, ...] = setting(())
    """Labels that nodes for workers have, `key=value`, such as `cloud.google.com/gke-accelerator=nvidia-h100-80gb`."""
    retries: int = setting(10, at_least=0)
    """Times that a failed job starts again, on a new Ray cluster, and goes on by the run's name."""
    database_image: str = setting("docker.io/library/postgres:17")
    """PostgreSQL for MLflow, where `mlflow_uri` names no server."""
    operator_namespace: str = setting("default")
    """Namespace in which KubeRay's operator is installed: it submits the job, and pods of other namespaces are kept away."""

    def __post_init__(self) -> None:
        """Raises SettingError for a namespace that Kubernetes would not take."""
        super().__post_init__()
        for key in ("namespace", "operator_namespace"):
            rule = "must be at most 63 of a-z, 0-9 and -, and begin and end with a letter or a digit"
            self._check_pattern(key, r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", rule)


@dataclass(frozen=True, kw_only=True)
class CloudPlace(_PlaceSection):
    """What Ray's cluster launcher and SkyPilot want to know."""

    name: ClassVar[str] = "cloud"

    provider: Literal["aws", "gcp", "local"] = setting("local")
    """Whose machines; `local`: those in `hosts`, by ssh."""
    region: str = setting("")
    """Region, such as `us-east-1`."""
    zone: str = setting("")
    """Availability zone or GCP's zone; empty: any."""
    project: str = setting("")
    """GCP's project."""
    head_type: str = setting("")
    """Type of the head's machine."""
    worker_type: str = setting("")
    """Type of the workers' machines."""
    machine_image: str = setting("")
    """Image of the machines (an AMI, or GCP's source image); empty: the launcher's own."""
    disk_gib: int = setting(200, at_least=20)
    """Disk of each machine."""
    spot: bool = setting(False)
    """Take workers that may be taken away, at their lower price."""
    hosts: tuple[str, ...] = setting(())
    """With `local`, addresses of the machines, the head's first."""
    ssh_user: str = setting("ubuntu")
    """Who logs in."""
    ssh_key: str = setting("")
    """Private key that opens them; empty: the launcher's own."""
    python: str = setting("")
    """Folder on each machine whose `bin` holds `raystride` and `ray`; empty: they are installed there."""
    role: str = setting("")
    """Who the machines are to the cloud: AWS's instance profile, or an account of Google's; empty: the launcher's own."""


@dataclass(frozen=True, kw_only=True)
class Place(_PlaceSection):
    """Somewhere to run: what there is, where runs lie, and what its scheduler wants to know."""

    name: ClassVar[str] = ""

    about: str = setting("")
    """One line that says which place this is."""
    nodes: int = setting(1, at_least=1)
    """Machines that one job may have at most."""
    gpus_per_node: int = setting(0, at_least=0)
    """GPUs of each."""
    cpus_per_node: int = setting(8, at_least=1)
    """Processors of each."""
    memory_gib: float = setting(32.0, above=0)
    """Main memory of each."""
    gpu: str = setting("")
    """What a GPU is called there, such as `H100`."""
    gpu_memory_gib: float = setting(0.0, at_least=0)
    """Memory of one GPU; 0: not known, and not looked at."""
    storage: str = setting("")
    """Where runs lie: a folder that every node sees under this name, or a URI such as `s3://bucket/runs`."""
    shared: bool = setting(False)
    """Whether that folder is one and the same on all nodes; a URI always is."""
    image: str = setting("raystride:latest")
    """Container image, by tag or digest; `deploy/Dockerfile` builds one."""
    mlflow_uri: str = setting("")
    """A tracking server; empty: that which is deployed along, or a file beside the runs."""
    price_per_hour: float = setting(0.0, at_least=0)
    """Of one node, in any currency; 0: not known."""
    slurm: SlurmPlace = SlurmPlace()
    """For `raystride deploy slurm`."""
    kubernetes: KubernetesPlace = KubernetesPlace()
    """For `raystride deploy kuberay`."""
    cloud: CloudPlace = CloudPlace()
    """For `raystride deploy launcher` and `sky`."""

    def __post_init__(self) -> None:
        """Raises SettingError for an image whose name is none."""
        super().__post_init__()
        self._check_pattern("image", r"[^\s${}'\"]+", "must be the name of an image, such as registry/raystride:latest")
