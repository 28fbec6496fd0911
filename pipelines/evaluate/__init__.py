"""A finished run opened again: test scores, predictions, generated text, export of models and adapters, serving.

load_run    a run's model, task and tokenizers, from its newest, best or averaged checkpoint
answering   predictions for documents, in batches;  parts: predictions for a part of the data
prediction  files of predictions;  evaluation: a split scored, with intervals and plots
recording   an evaluation in the record of its run
export      a folder for other programs;  mlflow_model: a model of MLflow's;  served: its serving code
serving     a language model behind OpenAI's protocol
apply_own_model, export_own_model    the same for models of users' own
"""
