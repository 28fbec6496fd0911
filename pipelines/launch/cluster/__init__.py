"""Ray cluster, workers and actors of a run; Ray Data is in `prepare.ray_data`, Ray Tune in `sweep.tuning`.

cluster    joins or starts a Ray cluster;  `resources`: its resources, and the allocation of a run
trainer    workers by Ray Train;  `elastic`: grows and shrinks the group during a run
recorder_handle    the recorder actor, and the handles of driver and workers on it
answering  batch inference on workers
fast_start    a trainer of private parts of Ray;  `internals`: all other uses of private parts, with a fallback for each
"""
