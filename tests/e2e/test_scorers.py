"""Scorers as processes: a teacher's engine against a Hugging Face forward pass, and user code that hangs or dies."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.engine.vllm_arguments import engine_env
from actors.scorers.actor import place_scorers
from actors.scorers.teacher_engine import TeacherEngine
from actors.scorers.workers import RayWorker
from service.config import AlgorithmConfig, Config
from service.config.rollout import ScorerConfig
from service.handoff.steps.wire import encode as encode_group
from service.rollout.chat.tokenizer import make_tokenizer
from service.scorers.reply import Failure, ScorerFailed, answer_from
from service.types import TrajectoryId
from tests.e2e.test_engine import CONFIG, VOCABULARY, dense
from tests.pure.buffer.world import step
from tests.pure.scorers.test_scorer import group_of

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_the_engine_of_a_teacher_agrees_with_a_forward_pass(local_ray: None, tmp_path: Path) -> None:
    model, rng = dense(3), np.random.default_rng(0)
    model.save_pretrained(tmp_path)
    engine = (
        ray.remote(TeacherEngine)
        .options(runtime_env={"env_vars": engine_env(CONFIG.generator)})
        .remote(CONFIG, tmp_path)
    )
    rows = [rng.integers(3, VOCABULARY, length).tolist() for length in (2, 17, 64, 320)]
    rows.append([*rows[2], *rows[1]])  # begins as another one
    found = ray.get([engine.logprobs.remote(row) for row in rows], timeout=300)
    for row, given in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
        assert given[0] is None and np.abs(np.array(given[1:]) - expected).max() < 1e-3


def test_code_that_hangs_or_dies_is_followed_by_another_process(local_ray: None, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, ["word"])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "word"}\n')
    uses = {"dies": "tests.pure.scorers.mine:dies", "hangs": "tests.pure.scorers.mine:hangs_for_long"}
    scorers = {name: ScorerConfig(use=use, options={}) for name, use in uses.items()}
    config = Config(scorers=scorers, algorithm=AlgorithmConfig(n_samples_per_prompt=2))
    actors = place_scorers(scorers, config.model_dump_json(), tmp_path, tmp_path / "rows.jsonl", {}, has_gpu=False)
    group = encode_group(group_of([step(TrajectoryId(0, 0), "p", 0)]))

    async def asked(worker: RayWorker, within: float) -> Any:
        await worker.ready()
        async with asyncio.timeout(within):
            return answer_from(await worker.ask(0, group), room=0)

    async def story() -> None:
        dying, hanging = (RayWorker(f"scorer-{name}-0", is_process=True) for name in uses)
        for _ in range(2):
            with pytest.raises(ScorerFailed) as failed:
                await asked(dying, 120)
            assert failed.value.reason is Failure.DIED
        await hanging.ready()
        with pytest.raises(TimeoutError):
            await asked(hanging, 2)
        hanging.renew()
        with pytest.raises(TimeoutError):  # it hangs anew in its new process, which answers in between
            await asked(hanging, 2)

    asyncio.run(story())
    assert len(actors) == 2
