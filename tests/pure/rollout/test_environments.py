"""How environments are found and made."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from datetime import date
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from baton.examples import data, text_to_sql
from baton.examples.lookup import Lookup
from service.config import load_config
from service.config.rollout import AGENT, EnvConfig
from service.environment_variables import USER_FOLDER
from service.errors import UserError
from service.rollout.check_inputs import check_environments, check_inputs
from service.rollout.environment import Task
from service.rollout.environments import registry as environments
from service.rollout.environments.registry import make_environment, synthetic_data
from service.rollout.factory import Environments, IsolatedEnvironment
from tests.pure.rollout.misbehaving import Echo

ECHO = "tests.pure.rollout.misbehaving:Echo"


MADE = Path("made.jsonl")


def task(env_class: str, uid: str = "p", **info: object) -> Task:
    return Task(uid, ({"role": "user", "content": "?"},), env_class, extra_info=info)


@pytest.mark.parametrize("trusted", [[], ["tests.pu"], ["tests.pure.rollout.misbehaving.deeper"]])
def test_a_class_of_a_module_that_is_not_trusted_is_refused(trusted: list[str]) -> None:
    with pytest.raises(UserError, match=r"env\.trusted_modules does not name 'tests\.pure\.rollout\.misbehaving'"):
        make_environment(ECHO, {}, trusted)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nobody", r"cannot be loaded, .* has no Nobody"),
        ("Eco", r"did you mean tests\.pure\.rollout\.misbehaving:Echo\?"),
    ],
)
def test_a_class_that_a_trusted_module_lacks_is_named_with_what_is_near(name: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        make_environment(f"tests.pure.rollout.misbehaving:{name}", {}, ["tests"])


@pytest.mark.parametrize("name", ["tests.pure.rollout.misbehaving:Echo", AGENT])
def test_an_environment_that_makes_no_rows_says_what_to_give_instead(name: str) -> None:
    with pytest.raises(UserError, match=r"makes no vocabulary.*give data\.train \(and data\.eval\), and model\.path"):
        synthetic_data(name, ["tests"], "vocabulary")


@pytest.mark.parametrize(
    ("call", "does", "told"),
    [
        ("rows", "raise ValueError('none left')", r"ValueError: none left \(makes_data.py:2\)"),
        ("rows", "raise SystemExit(4)", r"SystemExit: 4 \(makes_data.py:2\)"),
        ("rows", "return None", "'NoneType' object is not iterable"),
        ("rows", "return ['a row']", "'a row' is among its results"),
        ("vocabulary", "return ['word', 5]", "5 is among its results"),
        ("vocabulary", "return ['\\ud800']", r"'\\ud800' is among its results"),
        ("demonstrations", "return [[{'role': 'user'}]]", r"\[\{'role': 'user'\}\] is among its results"),
    ],
)
def test_a_function_for_synthetic_data_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, does: str, told: str
) -> None:
    (tmp_path / "makes_data.py").write_text(f"def {call}(*arguments):\n    {does}\nclass Maze: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "makes_data", raising=False)
    with pytest.raises(UserError, match=f"the function {call} of 'makes_data:Maze' failed: .*{told}$"):
        synthetic_data("makes_data:Maze", ["makes_data"], call)(1, 0)


@pytest.fixture
def nothing_looked_up() -> Iterator[None]:
    """What is registered is looked up anew, and what the test registers is forgotten afterwards."""
    environments.registered.cache_clear()
    yield
    environments.registered.cache_clear()


def test_an_installed_package_registers_an_environment_as_an_entry_point(
    monkeypatch: pytest.MonkeyPatch, nothing_looked_up: None
) -> None:
    point = EntryPoint("maze", ECHO, environments.GROUP)
    asked: list[str] = []
    monkeypatch.setattr(environments, "entry_points", lambda group: asked.append(group) or [point])
    for _ in range(3):
        assert type(make_environment("maze", {})).__name__ == "Echo"
    assert asked == ["baton.environments"], "packages are looked through once, not for every trajectory"
    with pytest.raises(UserError, match="the nearest is 'maze'"):
        make_environment("mase", {})


def test_a_row_names_its_own_environment_and_each_gets_its_own_options() -> None:
    config = EnvConfig(name="lookup", class_options={ECHO: {"suffix": "!"}}, trusted_modules=("tests",))
    made = Environments(config)
    assert isinstance(made.make(task("")), Lookup)
    echo = made.make(task(ECHO))
    assert isinstance(echo, Echo) and echo.suffix == "!"
    assert isinstance(Environments(EnvConfig(isolation="process")).make(task("")), IsolatedEnvironment)


@pytest.mark.parametrize(
    ("settings", "most"), [({"isolation": "process"}, 2), ({"name": "agent", "command": ["sh"]}, 2), ({}, 6)]
)
async def test_no_more_episodes_with_a_process_are_open_at_once_than_processes_are_allowed(
    settings: dict[str, object], most: int
) -> None:
    made, seen = Environments(EnvConfig.model_validate({**settings, "max_processes": 2})), [0]

    async def episode() -> None:
        async with made.room:
            seen.append(seen[-1] + 1)
            await asyncio.sleep(0)
            seen.append(seen[-1] - 1)

    await asyncio.gather(*(episode() for _ in range(6)))
    assert (seen[-1], max(seen)) == (0, most)


def test_rows_that_need_an_unknown_environment_are_found_before_the_run() -> None:
    check_environments(EnvConfig(), [task("", seed=1), task("lookup", seed="2")], MADE)
    with pytest.raises(UserError, match=r"no environment 'lokup'.*first needed by row 1, b\)"):
        check_environments(EnvConfig(), [task("", "a", seed=1), task("lokup", "b"), task("lokup", "c")], MADE)


@pytest.mark.parametrize(
    ("name", "reward_spec", "info", "told"),
    [
        ("gsm8k", {}, {}, "there is no 'ground_truth'"),
        ("gsm8k", {"ground_truth": "many"}, {}, "ground_truth 'many' is no number"),
        ("search_r1", {}, {}, "there is no 'ground_truth'"),
        ("search_r1", {"ground_truth": {"target": []}}, {}, "ground_truth has no answer"),
        ("search_r1", {"ground_truth": {"answer": "olt"}}, {}, "there is no 'target'"),
        ("search_r1", {"ground_truth": 3}, {}, "'int' object is not iterable"),
        ("text_to_sql", {"ground_truth": "SELECT 1"}, {}, "there is no 'db_id'"),
        ("text_to_sql", {"ground_truth": "SELECT 1"}, {"db_id": "../towns"}, "is no name of a database"),
        ("text_to_sql", {"ground_truth": None}, {"db_id": "towns"}, "ground_truth is no text"),
        ("lookup", {}, {}, "there is no 'seed'"),
        ("tests.pure.rollout.misbehaving:Picky", {}, {}, "I do not like it"),
    ],
)
def test_a_row_that_its_environment_could_not_play_is_named_before_the_run(
    name: str, reward_spec: dict[str, object], info: dict[str, object], told: str
) -> None:
    good = Task("a", ({"role": "user", "content": "?"},), "gsm8k", {"ground_truth": "1"})
    bad = Task("b", ({"role": "user", "content": "?"},), "", reward_spec, info)
    env = EnvConfig(name=name, trusted_modules=("tests.pure",))
    with pytest.raises(UserError, match=r"^dataset made\.jsonl, row 2: the environment .* cannot play it: ") as caught:
        check_environments(env, [good, good, bad, bad], MADE)
    assert told in str(caught.value)


def test_a_check_that_nobody_would_await_is_refused() -> None:
    env = EnvConfig(name="tests.pure.rollout.misbehaving:Promises", trusted_modules=("tests.pure",))
    with pytest.raises(UserError, match="write `def check_task`, without async"):
        check_environments(env, [task("")], MADE)


@pytest.mark.parametrize(("whose", "what"), [(Echo, "__init__"), (environments, "import_user_module")])
def test_an_environment_that_exits_while_it_is_made_is_a_clear_line(
    whose: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exits(*_: object) -> None:
        sys.exit("no licence")

    monkeypatch.setattr(whose, what, exits)
    with pytest.raises(UserError, match="SystemExit: no licence"):
        make_environment(ECHO, {}, ["tests"])


def test_a_row_that_cannot_enter_a_process_is_named_before_the_run() -> None:
    rows = [task("", seed=1), task("", seed=1, when=date(2026, 1, 1))]
    check_environments(EnvConfig(), rows, MADE)
    with pytest.raises(
        UserError, match=r"^dataset made\.jsonl, row 1, column when: it cannot be sent .* date is not JSON"
    ):
        check_environments(EnvConfig(isolation="process"), rows, MADE)
    with pytest.raises(UserError, match=r"env\.options"):
        check_environments(EnvConfig(options={"colour": 1}, isolation="process"), [task("")], MADE)


async def test_an_environment_that_leaves_the_folder_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_FOLDER, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    data.write_database(tmp_path / "towns.sqlite")
    (row,) = text_to_sql.rows(1, 0)
    asked = Task("p", (), "", row["reward_spec"], row["extra_info"])
    factory = Environments(EnvConfig(name="text_to_sql", options={"databases": "."}))
    for _ in range(2):
        episode = factory.make(asked)
        assert Path.cwd() == tmp_path
        os.chdir("/")
        await episode.reset(asked, 0)
        assert (await episode.step(f"<solution>{asked.reward_spec['ground_truth']}</solution>")).reward == 1.0
        await episode.close()


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ("scores:anwered", "has no anwered; did you mean tests.pure.agents.scores:answered?"),
        ("scores:__name__", "is no function"),
        ("nowhere:score", "importing tests.pure.agents.nowhere failed: ModuleNotFoundError"),
    ],
)
def test_a_function_that_cannot_score_an_agent_is_refused_before_the_run(score: str, reason: str) -> None:
    words = ["env.name=agent", "env.command=[sh]", f"env.score=tests.pure.agents.{score}"]
    config = load_config([Path("configs/quickstart.yaml")], words)
    with pytest.raises(UserError, match=re.escape(reason)):
        check_inputs(config.env, config.data, 0, has_endpoint=True, functions=())
