"""Has every node of a run prove its kernels on its GPU, beside the preparation of data or by `raystride check --kernels`.

with proving_beside(resolved, screen.log):                # at most about a minute, and once for a GPU and its versions
    prepared = open_prepared_data(...)
for node, report in prove_on_nodes(resolved, limit_s=60).items(): ...
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from raystride.pipelines.launch.cluster.network import NoAnswer, run_on_all_nodes
from raystride.pipelines.launch.preflight.check import ResolvedRun

if TYPE_CHECKING:  # slow import
    from raystride.pipelines.train.worker.prover import ProofReport

PROOF_S = 60.0
"""Seconds that a start may prove; what is not proved then is PyTorch's in this run."""
AHEAD_S = 120.0
"""Seconds of a round of `raystride check --kernels`, after which another process may have the table."""
MAX_ROUNDS = 10


Reports = Mapping[str, "ProofReport | NoAnswer"]
"""By host name and address."""


def prove_on_nodes(resolved: ResolvedRun, limit_s: float) -> Reports:
    """Proves on every node that computes, at the same time. Needs ray.init unless the run is inline."""
    from raystride.pipelines.train.worker.prover import START_S, NodeProof

    context = resolved.context
    proof = NodeProof(context.config, context.storage, limit_s)
    if context.is_inline:
        return {"this machine": proof()}
    answers = run_on_all_nodes(proof, limit_s + 2 * START_S)
    return {f"{node.name} ({node.address})": answer for node, answer in answers.items()}


@contextmanager
def proving_beside(
    resolved: ResolvedRun, log: Callable[[str], None], prove: Callable[[ResolvedRun, float], Reports] = prove_on_nodes
) -> Iterator[None]:
    """Proves in a thread during the block, and waits for it at the end; runs whose kernels need no proof prove nothing.

    What goes wrong is logged: the run then computes by PyTorch.
    """
    if resolved.allocation.device != "cuda" or resolved.context.config.model.kernels != "auto":
        yield
        return
    problems: dict[str, str] = {}

    def run() -> None:
        try:
            problems.update(list_problems(prove(resolved, PROOF_S)))
        except Exception as error:
            problems["this driver"] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, name="prove kernels", daemon=True)
    thread.start()
    yield  # who is interrupted or refused does not wait for the proof
    thread.join()
    for node, problem in problems.items():
        log(f"kernels could not be proved on {node}: {problem}")


def list_problems(reports: Reports) -> dict[str, str]:
    """Returns why nodes proved nothing more, by node."""
    found = {node: report.reason if isinstance(report, NoAnswer) else report.problem for node, report in reports.items()}
    return {node: problem for node, problem in found.items() if problem}


def prove_ahead(resolved: ResolvedRun) -> list[str]:
    """Proves all that the run needs, round by round until nothing more is gained; returns the lines of a report."""
    from raystride.pipelines.train.worker.prover import ProofReport, proof_table

    reports, before = dict[str, "ProofReport | NoAnswer"](), -1
    for _ in range(MAX_ROUNDS):
        reports = dict(prove_on_nodes(resolved, AHEAD_S))
        found = [report for report in reports.values() if isinstance(report, ProofReport)]
        left = sum(len(report.open) for report in found)
        if not left or left == before:
            break
        before = left
    problems, lines = list_problems(reports), list[str]()
    for node, report in reports.items():
        if node in problems:
            lines.append(f"kernels on {node}: not run: {problems[node]}")
        if isinstance(report, ProofReport) and report.gpu:
            name, driver, triton = report.gpu
            lines += [f"kernels on {node}: {name}, driver {driver}, Triton {triton}", proof_table(report)]
        elif node not in problems:
            lines.append(f"kernels on {node}: not run: it has no GPU, and CPUs compute by PyTorch")
    return lines
