"""Writes the results of an evaluation: as a table of text, and to the file that `--output` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.files import is_written_through, write_atomic

if TYPE_CHECKING:  # the command line checks `--output` before it imports anything large
    from service.evaluation.scores import Evaluation


def table(evaluations: Sequence[Evaluation]) -> str:
    """The results as a table: a header line, then one line per evaluation set, with aligned columns."""
    ks = sorted({k for of in evaluations for k in of.pass_at})
    head = ("set", "prompts", "trajectories", "score", *(f"pass@{k}" for k in ks), "turns", "tokens", "cut", "lost")
    lines = [head]
    for of in evaluations:
        passed = (f"{of.pass_at[k]:.3f}" if k in of.pass_at else "-" for k in ks)
        means = (f"{of.avg_score:.3f}", *passed, f"{of.avg_turns:.2f}", f"{of.avg_tokens:.1f}")
        ends = (f"{of.truncated_ratio:.1%}", str(of.n_lost))
        lines.append((of.name, str(of.n_prompts), str(of.n_trajectories), *means, *ends))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def write_output(file: Path, text: str) -> None:
    """Write results to a file. An ordinary file is replaced atomically; links, pipes and devices are written to
    directly."""
    if is_written_through(file):
        file.write_text(text, encoding="utf-8")
    else:
        write_atomic(file, text)
