"""Nothing grows too large to be read at once."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = sorted(
    path
    for folder in ("service", "actors", "examples", "scripts")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.startswith("test_")  # what `baton init` copies
)
FILE_LINES = 400
FUNCTION_LINES = 60
FOLDER_FILES = 15
LOOSE_FILES = 6
FUNCTION_LINES_P90 = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of every function in a file."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]
    return [((node.end_lineno or 0) - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}") for node in nodes]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_can_be_read_at_once(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES
    assert [name for lines, name in functions(path) if lines > FUNCTION_LINES] == []


def test_nine_of_ten_functions_are_short() -> None:
    lines = sorted(lines for path in CODE for lines, _ in functions(path))
    assert lines[len(lines) * 9 // 10] <= FUNCTION_LINES_P90


def modules(folder: Path) -> list[str]:
    """The modules that lie in a folder itself."""
    return sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")


def test_few_files_lie_loose_and_no_folder_is_a_heap() -> None:
    assert len(modules(ROOT / "service")) <= LOOSE_FILES
    folders = {path.parent for path in CODE if path.relative_to(ROOT).parts[0] in ("service", "actors")}
    heaps = {str(folder.relative_to(ROOT)): len(modules(folder)) for folder in folders}
    assert {folder: files for folder, files in heaps.items() if files > FOLDER_FILES} == {}


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_public_says_what_it_is(path: Path) -> None:
    """Modules, and public classes and functions at their top."""
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py" and not tree.body:
        return
    assert ast.get_docstring(tree), "the module"
    public = [node for node in tree.body if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
