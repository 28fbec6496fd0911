"""Many short trainings under Ray Tune, and one answer: what to use here, and why.

space     what is tried
trial     one training, watched until it is measured precisely enough; `tuning` runs them one after another
result    what became of a trial, a file each
choice    the best of them; `answer` joins to it what the scaling model makes of all, `observed` tells it of each
page      the answer as a page, with `views` and `pictures`; driver: all of it, from settings to exit code
"""
