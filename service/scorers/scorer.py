"""A scorer in its own process: turns the bytes of a group into the bytes of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.config.rollout import ScorerConfig
from service.handoff.scoring import Answer
from service.handoff.steps.wire import accepted_group
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Task
from service.scorers.reply import Logprobs, encode_answer
from service.scorers.teacher import TeacherAddress, check_tokenizers, taught
from service.scorers.user import UserScorer, trajectories_of


class Scorer:
    """Scores groups by a user's function or by a teacher."""

    def __init__(
        self,
        name: str,
        settings: ScorerConfig,
        roles: Sequence[str],
        model_folder: Path,
        tasks: Sequence[Task],
        engine: Logprobs | None = None,
    ) -> None:
        """`roles`: the configured roles; `model_folder`: the folder of the policy's model; `engine`: the engine of a
        teacher that has a `model`.

        Raises:
            UserError: a user's code, a key or a tokenizer is missing or not valid.
        """
        self._tasks, self._roles = tasks, roles
        check_tokenizers({name: settings}, model_folder)
        self._logprobs = engine
        """Computes the log-probabilities of a teacher; None if the scorer gives rewards."""
        if settings.url is not None:
            self._logprobs = TeacherAddress(name, settings).logprobs
        elif settings.use is not None:
            own = UserScorer(name, settings)
            if settings.kind == "teacher":
                self._logprobs = own.logprobs
            else:
                self._tokenizer = load_tokenizer(model_folder)
                self._rewards = own.rewards

    async def reply(self, row: int, data: bytes) -> bytes:
        """The bytes of the answer about the group in `data`, whose prompt is row `row` of the dataset.

        Raises:
            ScorerFailed: there was no valid answer.
        """
        group = accepted_group(data)
        if self._logprobs is not None:
            return encode_answer(Answer(logprobs=await taught(group.steps, self._logprobs)))
        trajectories = trajectories_of(group, self._tasks[row], self._decode, self._roles)
        return encode_answer(await self._rewards(trajectories))

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text
