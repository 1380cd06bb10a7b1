"""What no file of the project holds."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = sorted(
    path
    for folder in ("service", "actors", "examples", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
PRODUCT = [
    path
    for path in CODE
    if path.relative_to(ROOT).parts[0] in ("service", "actors", "examples") and not path.name.startswith("test_")
]
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
BUILT_IN = {"eval", "exec"}
QUALIFIED = {"yaml.load", "torch.load", "os.system", "os.popen"}
TRUE_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
MACHINE_PATHS = re.compile(r"(?<![\w.-])/(root|work|opt|home/\w+|tmp/scratch)/")
HOSTS = re.compile(r"//[\w.-]*(pypi|pythonhosted|npmjs)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_nothing_is_unpickled_evaluated_or_given_to_a_shell(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not MODULES & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in MODULES
    for call in calls(path):
        called = ast.unparse(call.func)
        assert called not in BUILT_IN | QUALIFIED, f"line {call.lineno}: {called}"
        for keyword in call.keywords:
            true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert not (keyword.arg in TRUE_KEYWORDS and true), f"line {call.lineno}: {keyword.arg}=True"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_nothing_is_swallowed_and_nothing_is_checked_by_assert(path: Path) -> None:
    """`python -O` drops an assert, and a caught error that becomes nothing was never seen."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            empty = all(isinstance(inner, ast.Pass) for inner in node.body)
            assert not (broad and empty), f"line {node.lineno}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_every_zip_says_whether_its_arguments_are_equally_long(path: Path) -> None:
    for call in calls(path):
        if isinstance(call.func, ast.Name) and call.func.id == "zip":
            assert "strict" in {keyword.arg for keyword in call.keywords}, f"line {call.lineno}"


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    # What is taken out of the working tree but not yet out of the index is not a file either.
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_place_of_one_machine() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".ico"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATHS.search(line) or HOSTS.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_no_work_is_left_for_later_in_comments() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    texts = [path for path in tracked() if path.suffix in (".py", ".md", ".yaml", ".toml") and path != Path(__file__)]
    assert [name_of(path) for path in texts if words.search(path.read_text())] == []
