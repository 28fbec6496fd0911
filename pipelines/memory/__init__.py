"""The memory that a worker will need, told before anything starts; needs no PyTorch, which the driver does without.

estimate     bytes of a worker, by kind
networks     the tasks' networks as sizes; `saved`: what each operation keeps for its backward
activations  from those to the most that is alive at once
"""
