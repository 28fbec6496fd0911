"""Deployment: writes the files that run a job on Compose, Slurm, Kubernetes or a cloud, from the run's settings and a place.

The templates are in `deploy/`, one folder a kind. `plan` checks that the run fits the place, and `render` makes the files.
`slurm`, `own_ray` and `before_end` run on the machines of the deployed job (`raystride node`).
"""
