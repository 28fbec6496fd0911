"""A run seen by its driver: checks, cluster, stalls and preemption, the run's folder and lease, terminal, deployment.

train_job   the steps of a training job, and its workers;  `adapters_job`: several adapters in one process
preparing   data preparation before or during a training, or as a job of its own
provenance  environment, data and tags that a run records
inline      training in the driver's process;  `profiled`: a job started under its profiler
finished    evaluation, prediction and export of a finished run

Its packages: `preflight` (checks), `cluster` (Ray), `run_store` (folder, lease, resume), `console` (terminal), `hang`
(stalls), `deploy` (files for Compose, Slurm, Kubernetes and clouds).
"""
