"""`baton agent-try`: serves one session, with an engine in this process or with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engine.run_player import RunPlayer
from service.agents.agents import Agents
from service.agents.trial import ScriptedPolicy, Trial
from service.config import Config
from service.rollout.chat.chat import load_chat
from service.rollout.chat.tokenizer import make_byte_tokenizer
from service.types import PolicyVersion

if TYPE_CHECKING:
    from actors.engine.vllm_engine import VllmEngine


def try_agent(config: Config, model: Path | None, script: list[str]) -> None:
    """Serve a session until it ends or a stop signal comes. `script`: the answers of the policy; empty if vLLM
    generates them. `model`: the model's folder; None: each token is a byte.

    Raises:
        UserError: the model cannot be read.
        RunFailed: the engine did not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="baton-try-") as folder:
        if model is None:
            make_byte_tokenizer(Path(folder))
        asyncio.run(_serve(config, model or Path(folder), script))


async def _serve(config: Config, model: Path, script: list[str]) -> None:
    async with contextlib.AsyncExitStack() as held:
        policy = (
            ScriptedPolicy(load_chat(model, config.generator), script) if script else await _vllm(config, model, held)
        )
        player = RunPlayer(config, model, policy)
        held.push_async_callback(player.close)
        player.load()
        if not isinstance(player.agents, Agents):
            raise RuntimeError("the configuration has no endpoint")
        trial = Trial(player.agents)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, trial.session.close)
        await trial.run(partial(policy.check, config.generator.request_deadline))


async def _vllm(config: Config, model: Path, held: contextlib.AsyncExitStack) -> VllmEngine:
    from actors.engine.vllm_engine import VllmEngine, engine_env  # with Ray and PyTorch, which takes seconds

    os.environ.update(engine_env(config.generator))
    engine = VllmEngine(config, model)
    held.push_async_callback(asyncio.to_thread, engine.stop)
    await engine.start(PolicyVersion(0, 0))
    return engine
