"""House rules that neither ruff nor the contracts of import-linter can hold; `make lint` holds the others."""

import ast
import re
import subprocess
from pathlib import Path

from service.config.load import key_paths
from tests.slowest import COMMITTED, read_seconds

ROOT = Path(__file__).parents[3]
PRODUCT = [path for folder in ("service", "actors", "baton") for path in (ROOT / folder).rglob("*.py")]
TRUE_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}
MACHINE_PATHS = re.compile(r"(?<![\w.-])/(root|work|opt|home/\w+|tmp/scratch)/")
HOSTS = re.compile(r"//[\w.-]*(pypi|pythonhosted|npmjs)")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def tracked() -> list[Path]:
    """The files of the repository, or of the folder where it is no checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    listed = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in listed or ROOT.rglob("*") if path.is_file() and path.suffix not in (".png", ".ico")]


def test_every_room_has_its_floor_and_no_contract_has_an_exception() -> None:
    contracts = (ROOT / "pyproject.toml").read_text().partition("[tool.importlinter]")[2]
    rooms = [path for top in ("service", "actors") for path in (ROOT / top).iterdir() if path.name[0] != "_"]
    rooms = [path for path in rooms if path.suffix == ".py" or any(path.glob("*.py"))]  # a cache alone is no room
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in rooms]
    assert [room for room in names if not re.search(rf"\b{room}\b", contracts)] == []
    assert "ignore_imports" not in contracts


def test_every_file_in_the_list_of_slow_test_files_is_there() -> None:
    assert [name for name in read_seconds(COMMITTED) if not (ROOT / name).is_file()] == []


def test_no_call_trusts_code_that_came_with_data() -> None:
    found = []
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg in TRUE_KEYWORDS and ast.unparse(node.value) == "True":
                found.append(f"{path.relative_to(ROOT)}:{node.value.lineno}: {node.arg}=True")
    assert found == []


WALL_CLOCK = re.compile(r"\b(time\.time(_ns)?\(|datetime\.(now|utcnow|today)\()|clock\.wall\(")
SHOWS_THE_TIME = {
    "service/clock.py": "",
    "service/handoff/journal/journal.py": "in frames, for people",
    "service/agents/policy_calls.py": "in answers, as the dialects have it",
    "service/observe/trackers.py": "in TensorBoard",
    "service/observe/merged_metrics.py": "in the status",
    "service/run/records/progress.py": "in lines of the metrics",
    "service/observe/recorder.py": "in the timeline",
    "actors/driver/commands.py": "how long the command took",
    "actors/observe/telemetry.py": "in the status",
    "actors/generator/scaling.py": "when Ray ends a drained node, which it says in Unix time; between 0 and the grace",
}
"""Files that read the wall clock, and for what; deadlines are those of the monotonic clock, which does not jump."""


def test_the_wall_clock_is_read_only_where_time_is_shown_or_somebody_else_gives_it() -> None:
    reads = {str(path.relative_to(ROOT)) for path in PRODUCT if WALL_CLOCK.search(path.read_text())}
    assert reads == SHOWS_THE_TIME.keys()


def test_no_file_names_a_place_of_one_machine_or_leaves_work_for_later() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        rules = [MACHINE_PATHS, HOSTS] + ([UNFINISHED] if path.suffix in (".md", ".yaml", ".toml", ".py") else [])
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if any(rule.search(line) for rule in rules):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_only_the_command_line_imports_the_actors_and_does_so_once() -> None:
    found = []
    for path in (ROOT / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] == "actors"]
    assert found == ["service/cli/in_ray.py: actors.driver.commands"]


SETTINGS = {".".join(path) for path in key_paths()}
SETTING = re.compile(
    r"(?<![\w./])(?:agents|algorithm|buffer|data|env|generator|placement|trainer|weights)\.[a-z]\w+(?![\w(.])"
)
"""A setting in a text, such as `trainer.lr`; what begins with `model` or `run` may be a tensor or a file."""


def test_every_setting_that_a_message_or_a_docstring_names_is_there() -> None:
    found = []
    for path in PRODUCT:
        texts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        for node in texts:
            named = SETTING.findall(node.value) if isinstance(node.value, str) else ()
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in named if name not in SETTINGS]
    assert [place for place in found if not place.endswith(".log")] == []
