"""A training with Accelerate: accelerate launch accelerate_before.py"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset, random_split

accelerator = Accelerator(gradient_accumulation_steps=2)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, held_out = random_split(dataset, [1600, 197], torch.Generator().manual_seed(0))
loader, held_out = DataLoader(train, batch_size=25, shuffle=True), DataLoader(held_out, batch_size=50)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 320))
model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)

for epoch in range(10):
    model.train()
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right = count = 0
    for images, labels in held_out:
        with torch.no_grad():
            guessed = model(images).argmax(1)
        guessed, labels = accelerator.gather_for_metrics((guessed, labels))
        right, count = right + int((guessed == labels).sum()), count + len(labels)
    accelerator.print(f"epoch {epoch + 1} accuracy {right / count:.3f}")
    accelerator.save_state(f"checkpoints/{epoch + 1}")
