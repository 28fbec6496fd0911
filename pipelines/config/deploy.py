"""Settings of `raystride deploy`: the resources of a run, and the description of the target to run on.

target = load_settings(TargetConfig, "deploy/places/slurm_two_nodes_of_eight.yaml").settings
request = DeployConfig(nodes=2, gpus_per_node=8, place="slurm_two_nodes_of_eight")
"""

import re
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from raystride.pipelines.config.run import FinishedRunConfig
from raystride.pipelines.config.section import Section, setting

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that no line of a script or a YAML file may hold."""


@dataclass(frozen=True, kw_only=True)
class DeployConfig(Section):
    """Resources of the run, the target to run on, and the output folder of the files."""

    name: ClassVar[str] = ""

    place: str = setting("")
    """Target: name of a description in `deploy/places`, or your own YAML file. Empty: the default target of the kind of
    files."""
    nodes: int = setting(1, at_least=1, at_most=100_000)
    """Number of machines, or of containers in their place."""
    gpus_per_node: int = setting(0, at_least=0, at_most=1024)
    """GPUs per node. 0: CPUs only."""
    output: str = setting("")
    """Output folder of the files. Empty: `deploy-`, the kind and the name of the run."""
    overwrite: bool = setting(False)
    """Overwrite files in the output folder that differ from those to be written."""
    job: Literal["train", "sweep"] = setting("train")
    """Command to run on the target."""
    array: int = setting(0, at_least=0, at_most=100_000)
    """Number of jobs in a Slurm array that share a grid sweep. Each measures its shard. 0: a single job."""


@dataclass(frozen=True, kw_only=True)
class DeployServeConfig(FinishedRunConfig):
    """Run to serve on GPUs with Ray Serve LLM."""

    place: str = setting("")
    """Target with the run in its storage. Name of a description in `deploy/places`, or your own YAML file. Empty:
    `storage`."""
    gpus: int = setting(1, at_least=1, at_most=64)
    """GPUs per replica. The model is sharded over them."""
    accelerator: str = setting("")
    """GPU type by Ray's name, such as `H100`. Empty: any."""
    min_replicas: int = setting(1, at_least=0, at_most=10_000, was="least_replicas", renamed="0.3")
    """Minimum number of replicas. 0: none without requests."""
    max_replicas: int = setting(1, at_least=1, at_most=10_000, was="most_replicas", renamed="0.3")
    """Maximum number of replicas, under high load."""
    port: int = setting(8000, at_least=1, at_most=65535)
    """Port on the head node's loopback address, 127.0.0.1."""
    output: str = setting("")
    """Output folder of the file. Empty: `serve-` and the name of the run."""
    overwrite: bool = setting(False)
    """Overwrite an existing file that differs from the one to be written."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, no run is named, or `max_replicas` is below `min_replicas`."""
        super().__post_init__()
        if self.min_replicas > self.max_replicas:
            raise self.error("min_replicas", f"must be at most max_replicas, {self.max_replicas}")


class _TargetSection(Section):
    """Settings of a target, written into scripts and YAML files; each text is one line without control characters."""

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
class SlurmConfig(_TargetSection):
    """Settings of Slurm jobs."""

    name: ClassVar[str] = "slurm"

    partition: str = setting("")
    """Partition. Empty: the cluster's default."""
    account: str = setting("")
    """Account to charge. Empty: your default account."""
    qos: str = setting("")
    """Quality of service (QOS). Empty: the default."""
    time_limit: str = setting("24:00:00")
    """Time limit of one start of the job, in Slurm's format. The job saves before the limit and is requeued."""
    activate: str = setting("")
    """Shell line that makes `raystride` available on every node. For example `source /shared/venv/bin/activate`."""
    modules: tuple[str, ...] = setting(())
    """Environment modules to load first."""
    extra: tuple[str, ...] = setting(())
    """Further sbatch options, such as `--constraint=h100`."""
    requeues: int = setting(100, at_least=0)
    """Maximum number of times that the job is requeued at its time limit."""
    tls: bool = setting(False)
    """Encrypt all traffic between Ray's processes with TLS. Each start of the job creates its own certificates."""

    def __post_init__(self) -> None:
        """Raises SettingError for a value that would be several words in a line of the batch script."""
        super().__post_init__()
        for key in ("partition", "account", "qos"):
            self._check_pattern(key, r"[^\s#'\"]+", "must be a name without spaces and quotes")
        if faulty := [option for option in self.extra if not option.startswith("-")]:
            raise self.error("extra", f"must be options of sbatch, which begin with `-`, not {faulty[0]!r}")


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig(_TargetSection):
    """Settings of Kubernetes."""

    name: ClassVar[str] = "kubernetes"

    namespace: str = setting("raystride")
    """Namespace of all objects."""
    storage_class: str = setting("")
    """Storage class of a volume that several nodes can write (ReadWriteMany). Used if `storage` is a folder."""
    storage_gib: int = setting(500, at_least=1)
    """Size of that volume in GiB."""
    service_account: str = setting("raystride")
    """Service account of the pods. With object stores, bind it to a role with write access."""
    queue: str = setting("")
    """Local queue of Kueue. Empty: none."""
    spot: bool = setting(False)
    """Place workers on preemptible (spot) nodes and tolerate their taint."""
    secret: str = setting("")
    """Secret with keys that become environment variables, such as AWS_ACCESS_KEY_ID. Empty: none."""
    role: str = setting("")
    """Cloud role of the service account. `arn:aws:iam::...` on EKS, or a Google service account on GKE. Empty: none."""
    node_labels: tuple[str, ...] = setting(())
    """Labels of the worker nodes, as `key=value`. For example `cloud.google.com/gke-accelerator=nvidia-h100-80gb`."""
    retries: int = setting(10, at_least=0)
    """Maximum number of restarts of a failed job. Each starts a new Ray cluster and resumes the run by its name."""
    database_image: str = setting("docker.io/library/postgres:17")
    """Container image of PostgreSQL for MLflow. Used if `mlflow_uri` names no server."""
    operator_namespace: str = setting("default")
    """Namespace of the KubeRay operator. The operator submits the job; pods of other namespaces have no access."""

    def __post_init__(self) -> None:
        """Raises SettingError for a namespace that Kubernetes would not take."""
        super().__post_init__()
        for key in ("namespace", "operator_namespace"):
            rule = "must be at most 63 of a-z, 0-9 and -, and begin and end with a letter or a digit"
            self._check_pattern(key, r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", rule)


@dataclass(frozen=True, kw_only=True)
class CloudConfig(_TargetSection):
    """Settings of Ray's cluster launcher and of SkyPilot."""

    name: ClassVar[str] = "cloud"

    provider: Literal["aws", "gcp", "local"] = setting("local")
    """Provider of the machines. `local`: the machines in `hosts`, by SSH."""
    region: str = setting("")
    """Region, such as `us-east-1`."""
    zone: str = setting("")
    """Availability zone or GCP zone. Empty: any."""
    project: str = setting("")
    """GCP project."""
    head_type: str = setting("")
    """Machine type of the head node."""
    worker_type: str = setting("")
    """Machine type of the worker nodes."""
    machine_image: str = setting("")
    """Machine image (an AMI, or a GCP source image). Empty: the launcher's default."""
    disk_gib: int = setting(200, at_least=20)
    """Disk size per machine in GiB."""
    spot: bool = setting(False)
    """Use preemptible (spot) workers at their lower price."""
    hosts: tuple[str, ...] = setting(())
    """Addresses of the machines of `local`, the head node's first."""
    ssh_user: str = setting("ubuntu")
    """SSH user."""
    ssh_key: str = setting("")
    """Private SSH key of the machines. Empty: the launcher's default."""
    python: str = setting("")
    """Folder on each machine with `raystride` and `ray` in its `bin`. Empty: they are installed there."""
    role: str = setting("")
    """Cloud role of the machines. An AWS instance profile, or a Google service account. Empty: the launcher's default."""

    def __post_init__(self) -> None:
        """Raises SettingError for a region or zone that SkyPilot would read as two."""
        super().__post_init__()
        for key in ("region", "zone"):
            self._check_pattern(key, r"[^/]+", "must be a name without `/`")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(_TargetSection):
    """Description of a deployment target: hardware, storage, and settings of its scheduler."""

    name: ClassVar[str] = ""

    about: str = setting("")
    """One line that describes the target."""
    nodes: int = setting(1, at_least=1)
    """Maximum number of machines per job."""
    gpus_per_node: int = setting(0, at_least=0)
    """GPUs per node."""
    cpus_per_node: int = setting(8, at_least=1)
    """CPUs per node."""
    memory_gib: float = setting(32.0, above=0)
    """Main memory per node in GiB."""
    gpu: str = setting("")
    """Name of the GPU type on the target, such as `H100`."""
    gpu_memory_gib: float = setting(0.0, at_least=0)
    """Memory of one GPU in GiB. 0: unknown, and not checked."""
    storage: str = setting("")
    """Folder or URI of the runs. A folder that every node sees under the same path, or a URI such as `s3://bucket/runs`."""
    shared: bool = setting(False)
    """Whether the storage folder is the same on all nodes. A URI always is."""
    image: str = setting("raystride:latest")
    """Container image, by tag or digest. `deploy/Dockerfile` builds one."""
    mlflow_uri: str = setting("")
    """URI of an MLflow tracking server. Empty: the one deployed with the run, or a file in the storage."""
    price_per_hour: float = setting(0.0, at_least=0)
    """Price of one node per hour, in any currency. 0: unknown."""
    slurm: SlurmConfig = SlurmConfig()
    """Settings for `raystride deploy slurm`."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Settings for `raystride deploy kuberay`."""
    cloud: CloudConfig = CloudConfig()
    """Settings for `raystride deploy launcher` and `sky`."""

    def __post_init__(self) -> None:
        """Raises SettingError for an invalid name of an image."""
        super().__post_init__()
        self._check_pattern("image", r"[^\s${}'\"]+", "must be the name of an image, such as registry/raystride:latest")
