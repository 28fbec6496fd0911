"""Matrix factorisation of ratings in an Arrow table, and the ratings of what nobody has rated yet.

    python examples/recommender.py

Each worker maps the file into its memory, where it is not read as a whole; `data` is a callable for that.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import raystride

USERS, FILMS = 200, 100
FILE = Path("ratings.arrow")
Batch = dict[str, Tensor]


def write_ratings(file: Path, count: int = 8000) -> None:
    """Writes ratings from 1 to 5 by users and films of two tastes; a stand-in for ratings of your own."""
    draw = np.random.default_rng(0)
    users, films = draw.integers(USERS, size=count), draw.integers(FILMS, size=count)
    ratings = np.clip(3 + 2 * np.cos(users) * np.cos(films) + 0.3 * draw.normal(size=count), 1, 5)
    table = pa.table({"user": users, "film": films, "rating": ratings.astype(np.float32)})
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)


def open_ratings(file: str) -> pa.Table:
    """The table, mapped into memory."""
    return pa.ipc.open_file(pa.memory_map(file)).read_all()


class Factors(nn.Module):
    """A rating is the product of a user's and a film's vector, and what each gives by itself."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, rank), nn.Embedding(FILMS, rank)
        self.user_mean, self.film_mean = nn.Embedding(USERS, 1), nn.Embedding(FILMS, 1)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        product = (self.users(user) * self.films(film)).sum(1)
        return 3 + product + self.user_mean(user)[:, 0] + self.film_mean(film)[:, 0]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    return (model(batch["user"], batch["film"]) - batch["rating"]).pow(2).mean()


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Adagrad, which rare users and films learn from as fast as others."""
    return torch.optim.Adagrad(model.parameters(), lr=learning_rate)


def train(file: Path = FILE, **settings: Any) -> raystride.Run:
    """Trains, or resumes the run `ratings`."""
    if not file.exists():
        write_ratings(file)
    return raystride.fit(
        model=Factors,
        data=open_ratings,
        loss=loss,
        optimizer=make_optimizer,
        settings={
            "fit.data_args.file": str(file.resolve()),
            "train.batch": 200,
            "train.epochs": 15,
            "optimizer.learning_rate": 0.3,
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 0,
            "validation.every": 100,
        }
        | settings,
        run="ratings",
        progress=True,
    )


if __name__ == "__main__":
    run = train()
    print(f"root mean squared error {run.summary['metrics']['val_loss'] ** 0.5:.2f}")
    pairs = {"user": np.zeros(FILMS, np.int64), "film": np.arange(FILMS)}
    rows = run.predict(pairs, fn=lambda model, batch: {"film": batch["film"], "rating": model(batch["user"], batch["film"])})
    best = sorted(rows, key=lambda row: -row["rating"])[:3]
    print(f"for user 0: {[row['film'] for row in best]}")
