"""What is written down of a run, and how it gets there without making the training wait.

    observers -> Sender.put -> [process border] -> Recorder.receive -> journal segment -> acknowledged -> Sender forgets
                                                                            |
                                                          Follower -> MLflow, then the reference in mlflow.json
                                                          TensorboardLog -> one event file an attempt

One writer: the recorder alone touches the run's journal and MLflow, so no worker holds credentials and SQLite has one
writer. Every arrow may break and is mended by the piece before it: senders repeat what is not acknowledged, a new recorder
reads the journal of the old one, the follower replays what MLflow missed with the original times.
"""

from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.environment import describe_environment
from raystride.pipelines.record.journal import read_entries
from raystride.pipelines.record.recorder import Recorder
from raystride.pipelines.record.sender import Sender
from raystride.pipelines.record.summary import STATUSES, SUMMARY_KEYS

__all__ = ["STATUSES", "SUMMARY_KEYS", "Entry", "Recorder", "Sender", "describe_environment", "read_entries"]
