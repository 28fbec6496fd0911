"""A training with Lightning: python lightning_before.py"""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))


class Classifier(lightning.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)


trainer = lightning.Trainer(
    max_epochs=10,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max"), EarlyStopping("val_accuracy", mode="max", patience=4)],
)
trainer.fit(
    Classifier(), DataLoader(train, batch_size=50, shuffle=True), DataLoader(held_out, batch_size=50), ckpt_path="last"
)
print(f"accuracy {trainer.callback_metrics['val_accuracy']:.3f}")
