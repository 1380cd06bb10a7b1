"""Chooses a teacher for each row of the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.config.learn import TeacherConfig
from service.config.rollout import ScorerConfig
from service.errors import UserError


def teachers_of(
    scorers: Mapping[str, ScorerConfig],
    teacher: TeacherConfig | None,
    columns: Sequence[Mapping[str, Any]],
    temperatures: Sequence[float | None],
) -> list[str]:
    """For each row of the dataset, the name of its teacher, chosen by the row's columns; empty for no teacher.
    `UserError` if a teacher is unknown, a row with a teacher has a temperature other than 1, or no row has a
    teacher."""
    known = [name for name, scorer in scorers.items() if scorer.kind == "teacher"]
    found: list[str] = []
    if teacher is None:
        return [""] * len(columns)
    for row, (of_row, temperature) in enumerate(zip(columns, temperatures, strict=True)):
        name = known[0] if teacher.column is None else of_row.get(teacher.column) or ""
        if name and name not in known:
            raise UserError(
                f"dataset, row {row}, column {teacher.column}: {name!r:.80} is no teacher among scorers "
                f"({', '.join(known)}); name one of them, or none"
            )
        if name and temperature not in (None, 1.0):
            raise UserError(
                f"dataset, row {row}, column temperature: {temperature:g}, but the teacher's log-probabilities are "
                "those at temperature 1, so the two could not be compared; leave it out"
            )
        found.append(name)
    if found and not any(found):
        raise UserError(
            f"algorithm.teacher.column: no row of the dataset names a teacher in its column {teacher.column!r}, so "
            f"nothing would be learned from {', '.join(known)}; give the column that does, or leave it out with one "
            "teacher"
        )
    return found
