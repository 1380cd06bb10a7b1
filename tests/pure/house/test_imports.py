"""Who may import whom."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAIN = sorted((ROOT / "service").rglob("*.py"))
SHELLS = sorted(path for folder in ("actors", "examples") for path in (ROOT / folder).rglob("*.py"))
KEPT_OUT = ("ray", "vllm", "actors", "examples")
"""What `service` does not import; the examples it names in strings only, such as `examples.lookup:Lookup`."""
ALLOWED = {
    ("service/cli/commands.py", "in_ray", "actors.driver.commands"),
}
"""The one lazy import of the entry point: the commands that need Ray."""


def module_name(path: Path) -> str:
    """`service/handoff/__init__.py` -> `service.handoff`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in [*PLAIN, *SHELLS]}


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement names; of `from a import b` both `a` and, where that is a module, `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module, "imports are absolute"
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in inner if name in MODULES] or [node.module]


def all_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(function or '', module) of every import in a file, wherever it stands."""
    tree = ast.parse(path.read_text())
    owners = {
        id(inner): outer.name
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported(node):
                yield owners.get(id(node), ""), name


def runtime_imports(path: Path) -> set[str]:
    """The modules of Baton that a module imports, also inside functions; not those that only a type checker reads."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    names: set[str] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {*imported(node)}
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
    return names & MODULES


@pytest.mark.parametrize("path", PLAIN, ids=module_name)
def test_service_imports_neither_ray_nor_vllm_nor_actors_nor_examples(path: Path) -> None:
    file = str(path.relative_to(ROOT))
    wrong = [
        (function, name)
        for function, name in all_imports(path)
        if name.split(".")[0] in KEPT_OUT and (file, function, name) not in ALLOWED
    ]
    assert wrong == []


def test_no_module_imports_itself_over_others() -> None:
    graph = {module_name(path): runtime_imports(path) - {module_name(path)} for path in [*PLAIN, *SHELLS]}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
