"""Hang detection: worker heartbeats, stack dumps from outside the process, and termination of the hanging group.

heartbeat   heartbeats of the workers, and the table of them
detector    decides from the heartbeats whether the group hangs, and on which ranks
stack_dump  stacks of a process, read from outside it
watch       all of it in a background thread of the driver
"""
