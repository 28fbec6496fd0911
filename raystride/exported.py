"""The model of a folder that `raystride export --to mlflow` wrote; its model code imports this module and no other of ours.

model = MlflowModel()
model.open("export/mlflow/artifacts/run")
model.predict(None, frame)                                # a data frame with the columns of the task's inputs
"""

from raystride.pipelines.evaluate.served import MlflowModel as MlflowModel
