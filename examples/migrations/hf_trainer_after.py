"""The training of hf_trainer_before.py with Raystride: python hf_trainer_after.py"""

from datasets import Dataset
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import raystride

images, labels = load_digits(return_X_y=True)
rows = {"pixel_values": (images / 16).astype("float32").reshape(-1, 1, 8, 8), "labels": labels}
split = Dataset.from_dict(rows).with_format("numpy").train_test_split(197, seed=0)

config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=96, num_labels=10
)  # fmt: skip


def accuracy(model, batch):
    return {"accuracy": (model(**batch).logits.argmax(1) == batch["labels"]).float().mean()}


run = raystride.fit(
    lambda: ViTForImageClassification(config),
    split["train"],
    lambda model, batch: model(**batch).loss,
    validation=split["test"],
    metrics=accuracy,
    settings={
        "train": {"batch": 50, "epochs": 12, "clip_norm": 1.0},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 32, "schedule": "linear", "min_lr_ratio": 0.0},
        "validation": {"every_epochs": 1, "samples": 0, "metric": "val_accuracy"},
        "checkpoint.every_epochs": 1,
    },
    run="from-hf",
)
print(f"accuracy {run.summary['metrics']['val_accuracy']:.3f}")
