"""How a run is started, owned, watched and ended.

On the driver:   driver (a job from settings to exit code), owner, resume, preflight, cluster, trainer, failure, inline
In each worker:  worker (the build lines), and nothing else of this folder
"""
