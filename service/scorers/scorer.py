"""A scorer in its own process: from the bytes of a group to those of an answer, in whatever way it is configured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.config.rollout import ScorerConfig
from service.handoff.scoring import Answer
from service.handoff.steps.wire import accepted_group
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Task
from service.scorers.address import Address
from service.scorers.reply import answer_of, encode_answer, request_from
from service.scorers.teacher import Logprobs, check_tokenizer, taught
from service.scorers.trajectories import trajectories_of
from service.scorers.user import called, user_function, user_logprobs


class Scorer:
    """Scores groups by a user's function, an address or an engine."""

    def __init__(
        self,
        name: str,
        settings: ScorerConfig,
        roles: Sequence[str],
        model_folder: Path,
        tasks: Sequence[Task],
        engine: Logprobs | None = None,
    ) -> None:
        """`roles`: the configured ones; `model_folder`: the policy's; `engine`: of a teacher with `model`.

        Raises:
            UserError: a user's code, a key or a tokenizer is missing or not as it must be.
        """
        self._teaches, self._tasks, self._roles = settings.kind == "teacher", tasks, roles
        self._tokenizer = None if self._teaches else load_tokenizer(model_folder)
        folder = settings.tokenizer or settings.model
        if self._teaches and folder is not None:
            check_tokenizer(name, folder, model_folder)
        self._function = None if settings.use is None else user_function(name, settings)
        self._address = None if settings.url is None else Address(name, settings)
        self._engine = engine

    async def reply(self, request: bytes) -> bytes:
        """The bytes of the answer to a request.

        Raises:
            ScorerFailed: no good answer.
        """
        return encode_answer(await self._answer(request))

    async def _answer(self, data: bytes) -> Answer:
        request = request_from(data)
        group = accepted_group(request.data)
        if self._teaches:
            return Answer(logprobs=await taught(group.steps, self._logprobs()))
        trajectories = trajectories_of(group, self._tasks[request.row], self._decode, self._roles)
        if self._address is not None:
            return await self._address.rewards(trajectories)
        if self._function is None:
            raise ValueError("a scorer of rewards has neither a function nor an address")
        return answer_of(await called(self._function, trajectories), len(trajectories))

    def _logprobs(self) -> Logprobs:
        if self._address is not None:
            return self._address.logprobs
        if self._engine is not None:
            return self._engine
        if self._function is None:
            raise ValueError("a teacher has neither a function, nor an address, nor an engine")
        return user_logprobs(self._function)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise ValueError("a teacher needs no texts")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text
