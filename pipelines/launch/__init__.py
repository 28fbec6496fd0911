"""How a run is started, owned, watched and ended.

On the driver:   driver (a job from settings to exit code), session (progress, signals, the end), failure (the one screen),
                 owner, resume, resources, preflight; cluster, trainer and lean for Ray, wire for the recorder, or inline
In each worker:  worker (the build lines), and nothing else of this folder
"""
