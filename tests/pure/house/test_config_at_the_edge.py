"""`Config` stays at the edge: a part takes a small settings object of its own, so its signature says what it needs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
EDGE = ("service/config/", "service/cli/", "actors/driver/")


def makes_settings(name: str) -> bool:
    """The one small function that makes a part's settings of the whole: `of(config)`, `batch_settings(config)`."""
    return name == "of" or name.endswith("settings")


def whole(path: Path) -> Iterator[str]:
    """`name:line` of each function that takes `Config`, and of each class that has it as a field."""
    is_actor = path.relative_to(ROOT).parts[0] == "actors"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            allowed = makes_settings(node.name) or (is_actor and node.name == "__init__")
            annotations = [] if allowed else [node.args]
        elif isinstance(node, ast.ClassDef):
            annotations = [inner.annotation for inner in node.body if isinstance(inner, ast.AnnAssign)]
        else:
            continue
        if any(re.search(r"\bConfig\b", ast.unparse(annotation)) for annotation in annotations):
            yield f"{node.name}:{node.lineno}"


def test_no_function_behind_the_edge_takes_the_whole_configuration() -> None:
    files = [path for folder in ("service", "actors") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {
        name: functions
        for path in files
        if not (name := str(path.relative_to(ROOT))).startswith(EDGE) and (functions := list(whole(path)))
    }
    assert found == {}
