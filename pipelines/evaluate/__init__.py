"""What one does with a trained model: a finished run is opened again, and asked.

opening     a run's model, task and tokenizers, from its newest, best or averaged checkpoint
answering   answers to documents, in batches;  writing: text from a prompt;  parts: answers to a part of the data
prediction  files of answers;  evaluation: a split scored, with intervals;  pictures: what the scores look like
recording   an evaluation in the record of its run
export      a folder for other programs;  mlflow_model: a model of MLflow's;  served: what that answers requests with
"""
