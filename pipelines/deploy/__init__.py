"""The same job on other machines: files for Compose, Slurm, Kubernetes and clouds, from a run's settings and a place's.

The templates lie in `deploy/`, one folder a kind. `plan` says what the run will take of the place, `render` writes
the files, `validate` looks at what was written; `slurm` is what such a job starts on Slurm's nodes.
"""
