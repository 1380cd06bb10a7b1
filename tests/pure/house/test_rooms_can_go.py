"""An optional room can go: without its folder, its lines at the edge and its own tests, the rest works as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
PARSER = "service/cli/parser.py"
PLAYER, LIBRARY = "actors/engine/run_player.py", "baton/library.py"
RUN, COMMANDS = "actors/driver/run.py", "actors/driver/commands.py"
UPLOADS = r"from service\.store\.uploads import .*\n"
CLUSTER, COORDINATOR, FACE = "actors/driver/cluster.py", "actors/driver/coordinator.py", "baton/__init__.py"
PREPARE, VALIDATE, TELEMETRY = "actors/driver/prepare.py", "service/cli/configuration.py", "actors/observe/telemetry.py"
GENERATOR = "actors/generator/actor.py"
LINES: dict[str, list[tuple[str, ...]]] = {
    "agents": [
        (PARSER, r'    Command\("agent-try".*\n'),
        (PLAYER, r"from actors\.engine\.agents import .*\n"),
        (PLAYER, r"(from service\.agents\..*\n)+"),
        (PLAYER, r"            agents=.*\n"),
        (PLAYER, r"            commands=.*\n"),
        (CLUSTER, r"from actors\.generator\.gateway .*\n", 'GATEWAY = "gateway"\n'),
        (CLUSTER, r"    if config\.endpoint is not None and secret .*\n(        .*\n)+"),
        (GENERATOR, r"from actors\.generator\.gateway .*\n"),
        (LIBRARY, r"(    from service\.agents\..*\n)+"),
        (LIBRARY, r'(        "service\.agents\..*\n)+'),
    ],
    "trace": [(PARSER, r'    Command\("trace".*\n'), (PARSER, r'    Command\("trajectories".*\n')],
    "store": [
        (RUN, UPLOADS),
        (RUN, r"            if \(url := config\.run\.store\) .*\n(                .*\n)+"),
        ("actors/driver/coordinator.py", UPLOADS),
        ("actors/driver/checkpointer.py", UPLOADS),
        ("actors/observe/telemetry.py", UPLOADS),
        (COMMANDS, r"from service\.store\.fetch import from_store", "from_store = None"),
    ],
    "scorers": [
        (CLUSTER, r"(from actors\.scorers\..*\n)+"),
        (CLUSTER, r"place_scorers\(.*\)", "{}"),
        (CLUSTER, r"\{\"the scorers\".*", "{}"),
        (CLUSTER, r", asking\)", ")"),
        (PREPARE, r"(from service\.scorers\..*\n)+"),
        (PREPARE, r"    check_scorers\(.*\n"),
        (PREPARE, r"    check_tokenizers\(.*\n"),
        (VALIDATE, r" +from service\.scorers\..*\n"),
        (VALIDATE, r"        \*\(partial\(check_scorers, .*\n"),
        (TELEMETRY, r"from service\.scorers\..*\n"),
        (TELEMETRY, r", REASONS\)", ")"),
        (FACE, r"(    from service\.scorers\..*\n)+"),
        (FACE, r"        \"service\.scorers\..*\n"),
    ],
    "evaluation": [
        (PARSER, r'    Command\("eval".*\n'),
        (COMMANDS, r"(?s)def evaluate\(.*?\n\n\n"),
        (COMMANDS, r'"eval": evaluate, '),
        (GENERATOR, r"(from service\.evaluation\..*\n)+"),
        (GENERATOR, r"(?s)    async def evaluate\(.*?(?=    async def )"),
        (
            COORDINATOR,
            r"actors\.evaluation\.during_training import Evaluations",
            "tests.pure.house.no_evaluations import NoEvaluations as Evaluations",
        ),
    ],
}
"""Room -> its lines at the edge: (file, what is taken out of it, what takes its place if that is not nothing)."""
OWN_FILES = {
    "agents": ["actors/engine/agents.py", "actors/driver/try_agent.py", "actors/generator/gateway.py"],
    "evaluation": ["actors/driver/evaluate_model.py", "service/cli/evaluate.py"],
}
"""Room -> its files elsewhere."""
OWN_TESTS = {
    "agents": ["pure/agents"],
    "trace": ["pure/timeline", "pure/trajectories"],
    "store": ["pure/store"],
    "scorers": ["pure/scorers"],
    "evaluation": ["pure/evaluation"],
}
"""Room -> folders of its tests; beside them go the files elsewhere that need it, directly or not."""
NEIGHBOURS = ["pure/cli", "pure/config", "pure/metrics", "pure/runfolder", "pure/rollout/test_player.py"]


def without(room: str, copy: Path) -> None:
    """A copy of the project without a room."""
    for folder in ("service", "actors", "baton", "tests", "configs", "benchmarks", "scripts", "docs", "deploy"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.rmtree(copy / "service" / room)
    shutil.rmtree(copy / "actors" / room, ignore_errors=True)  # most rooms have no actors
    for file in OWN_FILES.get(room, []):
        (copy / file).unlink()
    for file, line, *instead in LINES[room]:
        text, n = re.subn(line, "".join(instead), (copy / file).read_text())
        assert n == 1, f"{file}: {line}"
        (copy / file).write_text(text)
    for folder in OWN_TESTS[room]:
        shutil.rmtree(copy / "tests" / folder)
    left, imports = [*(copy / "tests").rglob("*.py"), *(copy / "benchmarks").rglob("*.py")], imports_of(room)
    while going := [path for path in left if path.exists() and imports.search(path.read_text())]:
        for path in going:
            path.unlink()
        modules = [".".join(path.relative_to(copy).with_suffix("").parts) for path in going]
        imports = re.compile(rf"^\s*from ({'|'.join(map(re.escape, modules))}) import", re.MULTILINE)


def imports_of(room: str) -> re.Pattern[str]:
    """Lines that import a room."""
    own = [
        rf"(service|actors|tests\.pure)\.{room}\b",
        *(re.escape(f.removesuffix(".py").replace("/", ".")) for f in OWN_FILES.get(room, [])),
    ]
    return re.compile(rf"^\s*(from|import) ({'|'.join(own)})", re.MULTILINE)


@pytest.mark.parametrize("room", LINES)
def test_the_rest_works_without_a_room(room: str, tmp_path: Path) -> None:
    without(room, tmp_path)
    left = [path for folder in ("service", "actors", "baton") for path in (tmp_path / folder).rglob("*.py")]
    inside = re.compile(rf"^\s*(from|import) (service|actors)\.{room}\b", re.MULTILINE)
    assert [str(path) for path in left if inside.search(path.read_text())] == []
    folders = [f"tests/{folder}" for folder in NEIGHBOURS if (tmp_path / "tests" / folder).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not full", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, *folders], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    command = [sys.executable, "-P", "-m", "service", "--help"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert not re.search(rf"^  +(baton )?{room}\b", said, re.MULTILINE) and "baton run" in said
