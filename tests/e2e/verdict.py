"""What has to hold of a run that has ended, whatever befell it."""

import json
from pathlib import Path
from typing import Any


def step_of(folder: Path) -> int:
    """The optimizer step that the folder of a run says was taken last."""
    file = folder / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return int(json.loads(whole.splitlines()[-1])["trainer/global_step"]) if whole else 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, one of each optimizer step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def judged(folder: Path, steps: int, stopped: bool = False) -> list[dict[str, Any]]:
    """The run's lines of `metrics.jsonl`: each step is there once, and no token was trained twice or is left open; a
    run that was stopped keeps its open groups."""
    lines = lines_of(folder)
    assert [line["trainer/global_step"] for line in lines] == list(range(1, steps + 1))
    assert [line["trainer/incarnation"] for line in lines] == sorted(line["trainer/incarnation"] for line in lines)
    tokens = json.loads((folder / "summary.json").read_text())["tokens"]
    assert stopped or tokens["open"] == tokens["stepped"] == tokens["rolled_back"] == 0
    assert tokens["trained"] + tokens["stepped"] == sum(line["tokens/loss"] for line in lines) > 0
    return lines
