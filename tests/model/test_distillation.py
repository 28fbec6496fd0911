"""Distillation has loss and gradients of plain PyTorch over all logits, and is off in evaluation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raystride.model.distillation import Distillation, _DistillationLoss, freeze
from raystride.model.linear import Linear
from raystride.model.objectives import DISTILLED_ROWS, DIVERGENCES, DivergenceName
from raystride.model.shape import IGNORED
from raystride.model.transformer import Decoder, PackedDecoder
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.memory.storages import Storages

WORDS = 50


def reference(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, divergence: str, ratio: float, temperature: float
) -> torch.Tensor:
    """Returns the loss sum by `F.kl_div` and `F.cross_entropy` of all logits (N, V) at once."""
    log_p, log_q = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    wanted, given = (log_q, log_p) if divergence == "forward_kl" else (log_p, log_q)
    rows = F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1)
    divergences = rows[targets != IGNORED].sum()
    labels = F.cross_entropy(student, targets, ignore_index=IGNORED, reduction="sum")
    return (1 - ratio) * labels + ratio * temperature**2 * divergences


def build(cls: type[Decoder] = Decoder, **settings: Any) -> Decoder:
    shape = {"layers": 1, "heads": 2, "hidden_size": 16, "context": 64, "architecture": "llama"} | settings
    return cls(ModelConfig(**shape), WORDS)


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = torch.randint(0, WORDS, (2, rows, 64)).unbind()
    return ids, targets.masked_fill(torch.rand(rows, 64) < 0.3, IGNORED)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("ratio", "temperature"), [(0.5, 1.0), (1.0, 2.0), (0.3, 4.0)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_chunks_have_the_loss_and_gradients_of_all_logits(
    divergence: DivergenceName, ratio: float, temperature: float, softcap: float
) -> None:
    torch.manual_seed(0)
    student = build(logit_softcap=softcap, tie_embeddings=bool(softcap))
    teacher = build(layers=2, hidden_size=24)
    freeze(teacher)
    ids, targets = tokens(2 * DISTILLED_ROWS // 64 + 1)
    student.distillation = Distillation(teacher, divergence, ratio, temperature)
    found, counted = student(ids, targets)
    logits = student.logits(student.hidden(ids)).flatten(0, 1)
    with torch.no_grad():
        wanted = teacher.logits(teacher.hidden(ids)).flatten(0, 1)
    expected = reference(logits, wanted, targets.flatten(), divergence, ratio, temperature)
    assert counted == (targets != IGNORED).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    parameters = list(student.parameters())
    gradients = zip(*(torch.autograd.grad(total / counted, parameters) for total in (found, expected)), strict=True)
    for ours, plain in gradients:
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_teacher_is_no_part_of_the_student_and_evaluation_has_the_labels_loss() -> None:
    torch.manual_seed(0)
    student, (ids, targets) = build(), tokens(2)
    names, plain = list(student.state_dict()), student(ids, targets)
    student.distillation = Distillation(build(layers=2))
    assert list(student.state_dict()) == names
    assert student(ids, targets)[0] != plain[0]
    assert student.eval()(ids, targets)[0] == plain[0]


def test_the_teacher_sees_packed_documents_as_the_student_does() -> None:
    torch.manual_seed(0)
    student, teacher, (ids, targets) = build(PackedDecoder), build(layers=2), tokens(1)
    freeze(teacher)
    student.distillation = Distillation(teacher, kd_ratio=1.0)
    found, _ = student(ids, torch.tensor([0, 20, 64], dtype=torch.int32), targets)
    plain = build()
    plain.load_state_dict(student.state_dict())
    plain.distillation = student.distillation
    parts = [plain(ids[:, part], targets[:, part])[0] for part in (slice(0, 20), slice(20, 64))]
    torch.testing.assert_close(found, torch.stack(parts).sum())


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_matrix_of_all_logits_is_held(divergence: DivergenceName) -> None:
    torch.manual_seed(0)
    student, teacher = (build(hidden_size=4) for _ in range(2))
    freeze(teacher)
    rules = Distillation(teacher, divergence)
    hidden, head = torch.randn(16 * DISTILLED_ROWS, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    teacher.head = Linear(4, 1000)
    freeze(teacher)
    seen, targets = torch.randn(16 * DISTILLED_ROWS, 4), torch.randint(0, 1000, (16 * DISTILLED_ROWS,))
    with Storages() as alive:
        _DistillationLoss.apply(hidden, head, seen, targets, rules, student._project)  # type: ignore[no-untyped-call]
    assert alive.most() < 6 * DISTILLED_ROWS * 1000 * 4


def test_a_frozen_head_gets_no_gradient() -> None:
    torch.manual_seed(0)
    student, (ids, targets) = build(), tokens(1)
    assert student.head is not None
    student.head.requires_grad_(False)
    teacher = build()
    freeze(teacher)
    student.distillation = Distillation(teacher)
    student(ids, targets)[0].backward()
    assert student.head.weight.grad is None
    assert student.embedding.weight.grad is not None
