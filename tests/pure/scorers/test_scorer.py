"""What a scorer is given, and how its answer is read: a user's code, a teacher."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from service.config.rollout import ScorerConfig
from service.errors import UserError
from service.handoff.ledger.scores import sampled_tokens
from service.handoff.prefixes.sharing import shared_form
from service.handoff.scoring import Answer
from service.handoff.steps.tables import ends_table, steps_table
from service.handoff.steps.values import packed_roles
from service.handoff.steps.wire import encode as encode_group
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.scorers.reply import Failure, ScorerFailed, answer_from, answer_of
from service.scorers.scorer import Scorer, taught
from service.scorers.user import trajectories_of
from service.types import Sender, Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import step
from tests.pure.learn.outcomes import played
from tests.pure.rollout.conftest import served

WORDS = [f"w{i}" for i in range(64)]
TASKS = [Task("p", ({"role": "user", "content": "w1"},), "", extra_info={"bonus": 2})]
MINE = "tests.pure.scorers.mine"


def group_of(steps: Sequence[Step]) -> StepGroup:
    ids = list(dict.fromkeys(step.trajectory for step in steps))
    ends = [TrajectoryEnd(of, "p", sum(s.trajectory == of for s in steps), "stop", 1.0) for of in ids]
    return StepGroup(Sender("", 0, 0), steps_table(steps), ends_table(ends))


GROUP = group_of([step(TrajectoryId(0, sample), "p", index) for sample in (0, 1) for index in (0, 1)])


def scorer(folder: Path, **settings: Any) -> Scorer:
    make_tokenizer(folder, WORDS)
    return Scorer("mine", ScorerConfig(**settings), (), folder, TASKS)


def answered(folder: Path, **settings: Any) -> Answer:
    async def ask() -> Answer:
        data = encode_group(GROUP)
        return answer_from(await scorer(folder, **settings).reply(0, data), room=len(data))

    return asyncio.run(ask())


def failure(folder: Path, **settings: Any) -> Failure:
    with pytest.raises(ScorerFailed) as failed:
        answered(folder, **settings)
    return failed.value.reason


def test_a_users_function_gets_texts_and_may_say_why(tmp_path: Path) -> None:
    answer = answered(tmp_path, use=f"{MINE}:lengths")
    assert answer.rewards is not None and len(answer.rewards) == 2 and min(answer.rewards) > 0
    assert [*answer.info] == ['{"uid":"p"}'] * 2


@pytest.mark.parametrize(
    ("given", "info"),
    [
        ((0.5, 1), []),
        ([np.float32(0.5), True], []),
        (np.array([0.5, 1.0]), []),
        ((np.array([0.5, 1.0]), ("so", None)), ["so", ""]),
        (([0.5, 1.0], ()), []),
    ],
)
def test_rewards_come_in_any_sequence_alone_or_with_infos(given: Any, info: list[str]) -> None:
    assert answer_of(given, 2) == ([0.5, 1.0], info, None)


@pytest.mark.parametrize("nothing", [None, 10**400, float("nan")])
def test_a_reward_that_no_float_holds_is_none_at_all(nothing: Any) -> None:
    assert np.isnan(answer_of([0.5, nothing], 2).rewards).tolist() == [False, True]  # type: ignore[arg-type]


def test_a_users_class_gets_its_options_and_the_row(tmp_path: Path) -> None:
    assert answered(tmp_path, use=f"{MINE}:Weighed", options={"weight": 0.5}).rewards == [2.5, 2.5]


def test_turns_say_who_spoke_and_what_they_were_given_later() -> None:
    steps = [step(TrajectoryId(0, sample), "p", index) for sample in (0, 1) for index in (0, 1)]
    ends = [
        TrajectoryEnd(TrajectoryId(0, 0), "p", 2, "stop", 1.0),
        TrajectoryEnd(
            TrajectoryId(0, 1), "p", 2, "stop", 1.0, packed_roles(["main", "critic"], ["critic"]), rewards=(0.5, 0.0)
        ),
    ]
    group = StepGroup(Sender("", 0, 0), steps_table(steps), ends_table(ends))
    plain, spoken = trajectories_of(group, TASKS[0], str, ["critic"])
    assert [turn.role for turn in plain.turns] == ["main", "main"]
    assert [turn.role for turn in spoken.turns] == ["main", "critic"]
    assert [now.reward - then.reward for now, then in zip(spoken.turns, plain.turns, strict=True)] == [0.5, 0.0]


@pytest.mark.parametrize(("bad", "line"), [("raises", 38), ("leaves", 43), ("cancels", 48)])
def test_what_a_users_code_raises_is_a_failure_with_file_and_line(tmp_path: Path, bad: str, line: int) -> None:
    with pytest.raises(ScorerFailed, match=rf"raised: .*\(mine.py:{line}\)$"):
        answered(tmp_path, use=f"{MINE}:{bad}")


@pytest.mark.parametrize(
    "use", ["tests.pure.scorers.nothing:here", f"{MINE}:nothing", f"{MINE}:__doc__", f"{MINE}:Unready"]
)
def test_code_that_is_not_there_or_cannot_be_made_is_refused_at_the_start(tmp_path: Path, use: str) -> None:
    with pytest.raises(UserError, match=r"scorers\.mine\.use: "):
        scorer(tmp_path, use=use)


# -- an address --------------------------------------------------------------------------------------------------------

BAD = (None, [None] * 3, [None] * 10, [None, *[{"1": {"logprob": "x"}}] * 9])
"""What is no list of the log-probabilities of ten tokens."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answered_by(folder: Path, handler: Handler, **settings: Any) -> Answer:
    async def ask() -> Answer:
        (app := web.Application(client_max_size=1 << 26)).router.add_post("/score", handler)
        async with served(app) as url:
            teacher, data = scorer(folder, kind="teacher", url=f"{url}/score", **settings), encode_group(GROUP)
            return answer_from(await teacher.reply(0, data), room=len(data))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"{}", Failure.HTTP),
        (200, b"[" * 100_000, Failure.MALFORMED),
        (200, b"[1, 2]", Failure.MALFORMED),
        (200, b" " * (10 << 20), Failure.TOO_LARGE),
        *((200, json.dumps({"choices": [{"prompt_logprobs": found}]}).encode(), Failure.MALFORMED) for found in BAD),
    ],
)
def test_a_bad_answer_of_a_teachers_address_is_a_failure_with_a_reason(
    tmp_path: Path, status: int, body: bytes, reason: Failure
) -> None:
    async def completions(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    with pytest.raises(ScorerFailed) as failed:
        answered_by(tmp_path, completions)
    assert failed.value.reason is reason


def test_a_teachers_address_that_hangs_or_is_not_there_is_a_failure(tmp_path: Path) -> None:
    async def completions(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    with pytest.raises(ScorerFailed) as failed:
        answered_by(tmp_path, completions, deadline=0.2)
    assert failed.value.reason is Failure.DEADLINE
    assert failure(tmp_path, kind="teacher", url="http://127.0.0.1:9/score") is Failure.HTTP


# -- teachers ----------------------------------------------------------------------------------------------------------


def test_a_teachers_tokenizer_has_to_be_the_policys(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "other", [*WORDS[1:], WORDS[0]])
    with pytest.raises(UserError, match="is another one than the policy's"):
        scorer(tmp_path, kind="teacher", use=f"{MINE}:Teacher", tokenizer=tmp_path / "other")


def test_an_endpoint_with_prompt_log_probabilities_is_a_teacher(tmp_path: Path) -> None:
    async def completions(request: web.Request) -> web.Response:
        question = await request.json()
        ids = question["prompt"]
        assert question["temperature"] == 1.0
        assert request.headers["Authorization"] == "Bearer secret"
        found: list[Any] = [
            None,
            *({str(ids[t]): {"logprob": -t / 8}, "7": {"logprob": -9}} for t in range(1, len(ids))),
        ]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": found}]})

    (tmp_path / "key").write_text("secret\n")
    settings = {"tokenizer": tmp_path, "key_file": tmp_path / "key"}
    made = [answered_by(tmp_path, completions, **settings), answered(tmp_path, kind="teacher", use=f"{MINE}:Teacher")]
    assert all(answer.logprobs is not None and len(answer.logprobs) == 8 for answer in made)
    assert made[0].logprobs.tolist() == made[1].logprobs.tolist() == [-3 / 8, -4 / 8, -8 / 8, -9 / 8] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(12))
def test_each_sampled_token_gets_the_log_probability_of_its_own_context(seed: int) -> None:
    """However steps branch, arrive and share prefixes: a number made of a token's whole context shows which it was."""
    rng = np.random.default_rng(seed)
    steps = [each for sample in range(3) for each in played(rng, TrajectoryId(0, sample), int(rng.integers(1, 5)))]
    order = rng.permutation(len(steps))
    table = steps_table([(shared_form(steps) if seed % 2 else steps)[i] for i in order])

    def of_context(token_ids: list[int]) -> float:
        return -float(hash(tuple(token_ids)) % 1000) / 1000

    async def logprobs(token_ids: list[int]) -> list[float]:
        return [of_context(token_ids[: t + 1]) for t in range(len(token_ids))]

    found = asyncio.run(taught(table, logprobs))
    whole = [[*each.prompt_ids.tolist(), *each.response_ids.tolist()] for each in steps]
    expected = [
        of_context(ids[: len(ids) - len(each.response_ids) + t + 1])
        for each, ids in zip(steps, whole, strict=True)
        for t in np.flatnonzero(each.loss_mask)
    ]
    assert np.allclose(found, np.array(expected, np.float32), atol=1e-6)
    in_order = np.concatenate([each.response_ids[each.loss_mask] for each in steps])
    assert table.token_ids_N[sampled_tokens(table)].tolist() == in_order.tolist()
