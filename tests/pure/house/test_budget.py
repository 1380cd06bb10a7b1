"""The budget of lines: docs/decisions/line-budget.md says what each raise bought."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_LINES = 41_160
"""Of all Python in service/ and actors/: the figure of the decision's last row, and 100 more."""


def test_the_production_code_is_within_its_budget_of_lines() -> None:
    files = [path for folder in ("service", "actors") for path in (ROOT / folder).rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= MAX_LINES, f"{lines} lines; take something out, or raise the budget with a reason"
