"""Habits of a repository: checks at a commit and workflows; each does what it says."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.check_files import MAX_BYTES, main, problems

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.bin", b"x" * (MAX_BYTES + 1), "are committed"),
        ("code.py", b"a = 1\n<<<<<<< ours\n", r"code\.py:2: a mark of a merge conflict"),
        ("a.yaml", b"a: [1", "cannot be read as yaml"),
        ("a.toml", b"a = ", "cannot be read as toml"),
        ("a.json", b"{", "cannot be read as json"),
        ("b.yml", b"\xff\xfe", "cannot be read as yml"),
    ],
)
def test_a_file_that_should_not_be_committed_is_refused(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = problems(path)
    assert re.search(said, problem)
    assert main([str(path)]) == 1


def test_workflows_call_what_there_is_with_few_rights_and_a_deadline() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [path.name for path in WORKFLOWS if read(path)["permissions"] != {"contents": "read"}] == []
    commands: set[str] = set()
    for job in [job for path in WORKFLOWS for job in read(path)["jobs"].values()]:
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            if "uses" in step:
                # A tag can be moved to other code, the name of a commit cannot.
                assert re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40}", step["uses"])
            else:
                commands.add(step["run"])
                command = step["run"].split()
                assert command == [".ci/run"] or (command[0] == "make" and set(command[1:]) <= targets)
    assert {".ci/run", "make docs", "make dist"} <= commands
