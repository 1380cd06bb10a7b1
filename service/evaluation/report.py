"""The results of an evaluation as a table, and as the file of `--output`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.config.paths import near
from service.errors import UserError
from service.files import write_atomic

if TYPE_CHECKING:  # the command line checks `--output` before it imports anything large
    from service.evaluation.scores import Evaluation


def table(evaluations: Sequence[Evaluation]) -> str:
    """One line per set below a head line, with aligned columns."""
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


def check_output(file: Path, option: str = "--output") -> None:
    """Raises `UserError` if results cannot be written to this file."""
    if file.is_dir():
        raise UserError(f"{option} {file}: is a folder; give a file")
    if not file.parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}{near(file.parent)}; make it first")
    if not os.access(file if _is_written_through(file) else file.parent, os.W_OK):
        raise UserError(f"{option} {file}: cannot be written; give a file that can")


def write_output(file: Path, text: str) -> None:
    """Write results: a plain file is replaced atomically; links, pipes and devices are kept and written to."""
    if _is_written_through(file):
        file.write_text(text, encoding="utf-8")
    else:
        write_atomic(file, text)


def _is_written_through(file: Path) -> bool:
    return file.is_symlink() or (file.exists() and not file.is_file())
