"""What the README shows works: its commands parse, its files are read, its links lead somewhere.

The block that submits a Ray job runs, word for word, in `tests/e2e/test_job.py`.
"""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.cli.parser import main
from service.config import Config, load
from service.config.checks import problems
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment
from service.rollout.prompts.dataset import load_tasks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(pages: list[Path] = PAGES) -> list[str]:
    """Every command line in the pages' shell blocks, without its comment."""
    lines = [line for page in pages for block in blocks(page.read_text(), "bash") for line in block.splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("make ")])
def test_every_make_command_is_a_target(command: str) -> None:
    words = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert words and set(words) <= targets()


def test_every_baton_command_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    named = {word for page in PAGES for word in re.findall(r"(?:^|`)baton ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"run", "config", "status"} <= named
    for word in sorted(named):
        with pytest.raises(SystemExit) as ended:
            main([word, "--help"])
        assert ended.value.code == 0, word


@pytest.mark.parametrize(
    "command", [line for line in commands() if re.match(r"baton (run|config) .*--config configs/", line)]
)
def test_every_baton_command_is_accepted(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[1:]
    assert main(words if words[0] == "config" else ["config", "validate", *words[1:]]) == 0


def sound(text: str, folder: Path, *overrides: str) -> Config:
    """The configuration in a block of a page, which has no problems."""
    (folder / "own.yaml").write_text(text)
    config = load([folder / "own.yaml"], [*overrides]).config
    assert problems(config) == []
    return config


def test_the_configuration_of_ones_own_is_right(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    config = sound(text, tmp_path)
    assert config.env.name == "my_envs:Guess" != Config().env.name


async def played(name: str, options: dict[str, int], task: Task, texts: list[str]) -> tuple[Sequence[Any], list[Any]]:
    """The first messages of an episode of an environment `module:Class`, and its answer to each text, until it ends."""
    episode = make_environment(name, options, [name.partition(":")[0]])
    first, results = await episode.reset(task, seed=0), []
    for text in texts:
        results.append(await episode.step(text))
    await episode.close()
    return first, [(each.reward, each.done, "".join(m["content"] for m in each.messages)) for each in results]


@contextmanager
def importable(folder: Path, name: str, code: str) -> Iterator[None]:
    """A module of one's own, with this code."""
    (folder / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        yield
    sys.modules.pop(name, None)


def test_the_environment_of_ones_own_plays_the_row(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(README, "python") if "my_envs.py" in block]
    (row,) = blocks(README, "json")
    (tmp_path / "train.jsonl").write_text(row)
    (task,) = load_tasks(tmp_path / "train.jsonl")
    with importable(tmp_path, "my_envs", code):
        first, said = asyncio.run(played("my_envs:Guess", {}, task, ["is it 40?", "then 43", "it is 42"]))
        assert first[0]["content"] == json.loads(row)["prompt"][0]["content"]
        assert said == [(0.0, False, "higher"), (0.0, False, "lower"), (1.0, True, "")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


FOLDERS = "service|actors|baton|configs|scripts|docs|deploy|requirements|benchmarks|tests"


OWN_PAGES = [page for page in [*PAGES, ROOT / "SECURITY.md"] if page.name != "comparison.md"]
"""Without the page that names files of other projects."""


@pytest.mark.parametrize("page", OWN_PAGES, ids=lambda page: page.name)
def test_every_file_and_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w/.-]*)(?:::(\w+))?`", page.read_text())
    missing = [path for path, _ in named if not (ROOT / path).exists()]
    assert missing == []
    assert [test for path, test in named if test and f"def {test}(" not in (ROOT / path).read_text()] == []
