"""A job from its settings to its exit code, in the driver: how a run is started, owned, watched and ended.

driver     train, prepare, check: the order of things
preflight  what could go wrong, looked at first;  `owner`: one driver a run;  `resume`: its name started again
inline     a training in this very process;  `profiled`: a job that its profiler has to start
session    a training under way: signals, `progress`, the end;  `failure`: the cause on one screen
"""
