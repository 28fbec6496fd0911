"""Preference training of a decoder (DPO, IPO): pairs of a chosen and a rejected answer, against a reference model.

    r_c, r_r = log pi(c | x) - log ref(c | x), likewise of the rejected answer;  h = r_c - r_r
    dpo  -(1 - s) log sigmoid(b h) - s log sigmoid(-b h)      Rafailov et al. (2023), equation 7; s: Mitchell (2023), cDPO
    ipo  (r_c / |c| - r_r / |r| - 1 / (2 b))^2                Azar et al. (2023), equation 17, as means over ids

Shapes: ids and words (2B, T), the chosen answers' rows before the rejected ones', each behind its prompt; reference (B, 2);
targets (B), 0 if a pair counts, else -100.

    model = PreferenceDecoder(shape, vocabulary_size=4096, rule=PairRule(beta=0.1))
    loss_sum, counted = model(ids, words, reference, targets)
"""

from functools import partial
from typing import NamedTuple

import torch

from raystride.model.linear import linear
from raystride.model.objectives import PAIR_LOSSES, PairLossName
from raystride.model.shape import IGNORED, DecoderShape
from raystride.model.transformer import Decoder
from raystride.triton_kernels.linear_log_probabilities import linear_log_probabilities

FIGURES = ("pairs", "accuracy", "margin", "chosen_reward", "rejected_reward", "kl")
"""Metrics summed over pairs, in this order; see `pair_figures`."""


class PairRule(NamedTuple):
    """The loss over pairs and its parameters."""

    kind: PairLossName = "dpo"
    beta: float = 0.1
    """Strength of the pull towards the reference; IPO's tau."""
    label_smoothing: float = 0.0
    """Assumed probability that a pair is labelled the wrong way round; only `dpo`."""


def pair_losses(ratios: torch.Tensor, lengths: torch.Tensor, rule: PairRule) -> torch.Tensor:
    """Returns the loss of each pair (B) from its answers' log-ratios and lengths in ids, both (B, 2), chosen first."""
    return PAIR_LOSSES[rule.kind].losses(ratios, lengths, rule.beta, rule.label_smoothing)


def pair_figures(ratios: torch.Tensor, counts: torch.Tensor, beta: float) -> torch.Tensor:
    """Returns FIGURES of each pair, (B, 6) in fp64, from log-ratios (B, 2); zeros for ignored pairs (counts (B), bool).

    A reward is beta times a log-ratio, the margin their difference; accuracy is 1 if it is above 0. `kl` is the mean
    negative log-ratio of the two answers: Schulman's first estimator (k1 in
    "Approximating KL Divergence", 2020) of KL(reference || model), unbiased if the reference wrote the answers.
    """
    ratios = ratios.detach().double()
    chosen, rejected = (beta * ratios).unbind(1)
    margins = chosen - rejected
    figures = torch.stack((torch.ones_like(margins), (margins > 0).double(), margins, chosen, rejected, -ratios.mean(1)), 1)
    return figures.where(counts[:, None], 0.0)


class PreferenceDecoder(Decoder):
    """A `Decoder` with a loss over pairs. In training it sums FIGURES until `pop_figures`."""

    def __init__(self, shape: DecoderShape, vocabulary_size: int, rule: PairRule) -> None:
        super().__init__(shape, vocabulary_size)
        self.rule = rule
        self._figures: torch.Tensor | None = None

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, words: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of losses of pairs that count, and their number."""
        ratios, counts = self.log_ratios(ids, words, reference), targets != IGNORED
        losses = pair_losses(ratios, answer_lengths(words), self.rule)
        if self.training:
            self._add_figures(ratios, counts)
        return self._with_routing((losses.where(counts, 0.0).sum(), counts.sum()), words)

    def log_ratios(self, ids: torch.Tensor, words: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Returns the log-ratio of model to reference for each answer, in nats, (B, 2)."""
        return self.log_probabilities(ids, words).view(2, -1).t() - reference

    def log_probabilities(self, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Returns the log-probability in nats of each row's words, (rows) of (rows, T); IGNORED words do not count."""
        product, hidden = partial(linear, products=self.products), self.hidden(ids)
        head = self._head_weight().to(hidden.dtype)  # a frozen head may be stored in fewer bits
        return linear_log_probabilities(hidden, head, words, ignore_index=IGNORED, product=product).sum(1)

    def _add_figures(self, ratios: torch.Tensor, counts: torch.Tensor) -> None:
        found = pair_figures(ratios, counts, self.rule.beta).sum(0)
        self._figures = found if self._figures is None else self._figures + found

    def pop_figures(self) -> torch.Tensor | None:
        """Returns and resets FIGURES (6) in fp64 over pairs trained on since the last call; None if there were none."""
        found, self._figures = self._figures, None
        return found


def exclude_figures_from_compile() -> None:
    """Makes torch.compile skip the sums of figures. Not a decorator: that would add a second to every start."""
    PreferenceDecoder._add_figures = torch.compiler.disable(PreferenceDecoder._add_figures)  # type: ignore[method-assign]


def answer_lengths(words: torch.Tensor) -> torch.Tensor:
    """Returns the number of ids of each answer, (B, 2), from words (2B, T)."""
    return (words != IGNORED).sum(1).view(2, -1).t()
