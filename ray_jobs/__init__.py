"""Scripts for `ray job submit -- python ray_jobs/train.py`, one for each job; each runs the command `raystride`."""
