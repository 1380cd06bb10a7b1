"""The best evaluation of a run: `run.keep_best` names the score, and `best/` in the run folder has its weights."""

from __future__ import annotations

from pathlib import Path

from service.run.folder import EVALUATIONS, read_lines


def is_best(folder: Path, key: str, step: int) -> bool:
    """Whether the evaluation after `step` has the highest score of the run so far; of several with this score the first
    is the best.

    `key` is `eval/<set>/<score>`.
    """
    name, _, score = key.removeprefix("eval/").rpartition("/")
    scores = {line["step"]: line[score] for line in read_lines(folder / EVALUATIONS) if line["set"] == name}
    return step in scores and all(scores[step] > value for other, value in scores.items() if other != step)
