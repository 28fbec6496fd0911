"""Many short trainings, and the scaling model that recommends one of them.

space     the settings to try
trial     one training, watched until it is measured precisely enough; `tuning` runs them one after another
result    the outcome of a trial, a file each
choice    the best of them; `answer` adds the scaling model of all trials, `observed` translates each for it
report_page  the answer as a page, with `views` and `pictures`; sweep_job: from settings to exit code
"""
