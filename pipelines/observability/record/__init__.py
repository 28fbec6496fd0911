"""The record of a run: journal, summary, MLflow and TensorBoard, written without delaying the training.

    observers -> Sender.put -> [process border] -> Recorder.receive -> journal segment -> acknowledged -> Sender forgets
                                                                            |
                                                          Follower -> MLflow, then the reference in mlflow.json
                                                          TensorboardLog -> one event file an attempt

Only the recorder writes the run's journal and MLflow, so no worker holds credentials and SQLite has one writer. If an arrow
breaks, the component before it recovers: senders repeat unacknowledged entries, a new recorder reads the journal of the old
one, and the follower replays to MLflow the segments that it missed, with their original times.
"""

from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.environment import describe_environment
from raystride.pipelines.observability.record.journal import read_entries
from raystride.pipelines.observability.record.recorder import Recorder
from raystride.pipelines.observability.record.sender import Sender
from raystride.pipelines.observability.record.summary import STATUSES, SUMMARY_KEYS

__all__ = ["STATUSES", "SUMMARY_KEYS", "Entry", "Recorder", "Sender", "describe_environment", "read_entries"]
