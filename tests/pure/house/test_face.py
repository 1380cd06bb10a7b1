"""The public face: what `baton` and `baton.library` export is there, explained, and all that examples and pages use."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "baton" / "examples").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", ["baton", "baton.library"])
def test_every_export_is_there_has_a_docstring_and_stands_in_the_table(name: str) -> None:
    module = importlib.import_module(name)
    source = ast.parse(Path(module.__file__ or "").read_text())
    # What a type checker sees is what there is at run time.
    seen = [
        (node.module, alias.name, alias.asname or alias.name)
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    words = set(re.findall(r"\w+", module.__doc__ or ""))
    assert sorted(here for _, _, here in seen) == sorted(module.__all__)
    for home, there, here in seen:
        assert getattr(module, here) is getattr(importlib.import_module(str(home)), there)
        assert getattr(module, here).__doc__ and here in words
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_the_face_alone_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'vllm', 'pydantic', 'numpy'}"
    code = f"import sys, baton, baton.library, baton.training; sys.exit(str({heavy} & set(sys.modules) or 0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr in ("", "0\n")


def test_examples_and_pages_use_the_face_only() -> None:
    inside = re.compile(r"^(?:>>> )?(?:from|import) ((?:service|actors)[\w.]*)", re.MULTILINE)
    assert [path for path in [*EXAMPLES, *PAGES] if inside.search(path.read_text())] == []
