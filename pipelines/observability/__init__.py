"""Everything that a run measures and shows: metrics and their journal, MLflow, profiles, hardware, the report page.

observers  the loop's hooks, which measure;  `hardware`: readings of GPUs and CPUs
record     the journal of all figures, their summary, MLflow and TensorBoard
profiling  steps under a profiler, and stacks of steps that do not end;  `phases`: the named parts of a step
report     the closing screen and the page of a run;  `pages`: what HTML pages share
"""
