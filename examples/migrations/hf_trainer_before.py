"""A training with the Trainer of Hugging Face: python hf_trainer_before.py"""

from datasets import Dataset
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

images, labels = load_digits(return_X_y=True)
rows = {"pixel_values": (images / 16).astype("float32").reshape(-1, 1, 8, 8), "labels": labels}
split = Dataset.from_dict(rows).with_format("numpy").train_test_split(197, seed=0)

config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=96, num_labels=10
)  # fmt: skip


def compute_metrics(predicted):
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


trainer = Trainer(
    ViTForImageClassification(config),
    TrainingArguments(
        output_dir="from-hf",
        per_device_train_batch_size=50,
        num_train_epochs=12,
        learning_rate=3e-3,
        warmup_steps=32,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
    ),
    train_dataset=split["train"],
    eval_dataset=split["test"],
    compute_metrics=compute_metrics,
)
trainer.train()
print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
