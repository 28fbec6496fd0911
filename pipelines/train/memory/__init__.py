"""Estimates a worker's memory before anything starts; needs no PyTorch, as the driver does not import it.

estimate     bytes of a worker, by component
networks     the tasks' networks as sizes; `saved`: the tensors that each operation saves for its backward
activations  from those to the peak of live bytes in a step
storages     what a step that runs holds at each moment; the others do without PyTorch
"""
