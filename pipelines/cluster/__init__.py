"""All that touches Ray, but for Ray Data (`prepare.ray_data`) and Ray Tune (`sweep.tuning`).

cluster    joining or starting one;  `resources`: what there is, and what a run takes of it
trainer    workers by Ray Train;  `elastic`: fewer and more of them while the run lasts
recorder_handle    the recorder as an actor, and each end's view of it
answering  parts of data answered by a trained model on workers
internals  the one file that knows private parts of Ray, and what is done without each
"""
