"""A scorer in its own process: turns the bytes of a group into the bytes of an answer.

A teacher gives the log-probabilities of the sampled tokens of a group. The steps are merged into rows, so that shared
prefixes are computed once; each sampled token lies in exactly one row:

    step 0: [10 20 | 40 50]   step 1: [10 20 40 50 60 | 80]      sampled: 40 50 80
    row     [10 20 40 50 60 80]  ->  log p of each token given the tokens before it  ->  log p of 40 50 80
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import xxhash

from service.columns import lengths_of
from service.config.rollout import ScorerConfig
from service.errors import UserError
from service.handoff.prefixes.merge import merge_in_order
from service.handoff.scoring import Answer
from service.handoff.steps.tables import in_order
from service.handoff.steps.wire import accepted_group
from service.rollout.chat.frozen import key_header, whole_body
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Task
from service.scorers.reply import MAX_REPLY_BYTES, Failure, Logprobs, ScorerFailed, encode_answer
from service.scorers.user import UserScorer, trajectories_of
from service.types import Float32s, Steps

ROWS_AT_ONCE = 8
"""Maximum number of a group's rows that a teacher is asked about at once."""
LOGPROB_BYTES = 1 << 9
"""Maximum bytes of a token's log-probability in a JSON answer."""


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


async def taught(steps: Steps, logprobs: Logprobs) -> Float32s:
    """The log-probability of each sampled token, in the order of `service.handoff.ledger.scores.sampled_tokens`.

    Raises:
        ScorerFailed: the teacher gave another number of log-probabilities, or a value that is not a number.
    """
    if not len(steps):
        return np.zeros(0, np.float32)
    steps, number_K = in_order(steps)
    rows, room = merge_in_order(steps, number_K, "tree", by_turn=True).rows, asyncio.Semaphore(ROWS_AT_ONCE)
    bounds = rows.offsets_R.tolist()

    async def of_row(r: int) -> Float32s:
        token_ids: list[int] = rows.token_ids_N[bounds[r] : bounds[r + 1]].tolist()
        async with room:
            return _checked(await logprobs(token_ids), len(token_ids))

    found_N = np.concatenate(await asyncio.gather(*map(of_row, range(len(rows)))))
    sampled = np.flatnonzero(rows.loss_mask_N)
    if rows.turn_N is None:
        raise ValueError("rows were merged without the turns of their tokens")
    sample_N = np.repeat(rows.sample_R, lengths_of(rows.offsets_R))
    return np.asarray(found_N[sampled[np.lexsort((sampled, rows.turn_N[sampled], sample_N[sampled]))]])


def _checked(given: Sequence[float | None], n_tokens: int) -> Float32s:
    try:
        found_T = np.array([0.0, *given[1:]], np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScorerFailed(Failure.MALFORMED, f"log-probabilities: {error}"[:200]) from error
    if found_T.shape != (n_tokens,):
        raise ScorerFailed(Failure.MALFORMED, f"log-probabilities of shape {found_T.shape} for {n_tokens} tokens")
    return found_T


class TeacherAddress:
    """A teacher behind a completions endpoint of vLLM.

    POST {"prompt": [10, 20], "prompt_logprobs": 0, ..}   -> {"choices": [{"prompt_logprobs": [null, {"20": ..}]}]}
    """

    def __init__(self, name: str, settings: ScorerConfig) -> None:
        """Raises `UserError` if the teacher's key file contains no readable key."""
        self._url = settings.url or ""
        self._timeout = aiohttp.ClientTimeout(total=settings.deadline)
        self._headers = {"Content-Type": "application/json"} | key_header(f"scorers.{name}.key_file", settings.key_file)

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """Request the log-probability of each token given the tokens before it.

        Raises:
            ScorerFailed: there was no valid answer.
        """
        body = await self._post(token_ids)
        try:
            found = json.loads(body)["choices"][0]["prompt_logprobs"]
            rest = zip(token_ids[1:], found[1:], strict=True)
            return [None, *(float(of[str(token)]["logprob"]) for token, of in rest)]
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            detail = f"no prompt_logprobs: {type(error).__name__}: {error}"
            raise ScorerFailed(Failure.MALFORMED, detail[:200]) from error

    async def _post(self, token_ids: list[int]) -> bytes:
        question: dict[str, Any] = {"prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        most_bytes = MAX_REPLY_BYTES + LOGPROB_BYTES * len(token_ids)
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, headers=self._headers) as session,
                session.post(self._url, data=json.dumps(question), allow_redirects=False) as response,
            ):
                body = await whole_body(response, most_bytes)
        except TimeoutError:
            raise ScorerFailed(Failure.DEADLINE, f"{self._url} did not answer") from None
        except aiohttp.ClientError as error:
            raise ScorerFailed(Failure.HTTP, f"{type(error).__name__}: {error}"[:200]) from error
        if body is None:
            raise ScorerFailed(Failure.TOO_LARGE, f"more than {most_bytes} bytes")
        if response.status != 200:
            raise ScorerFailed(Failure.HTTP, f"status {response.status}: {body[:200].decode(errors='replace')}")
        return body


def check_tokenizers(scorers: Mapping[str, ScorerConfig], model_folder: Path) -> None:
    """Raises `UserError` unless every teacher's tokenizer gives each token the id that the policy's tokenizer gives
    it."""
    for name, scorer in scorers.items():
        if scorer.kind != "teacher" or (folder := scorer.tokenizer or scorer.model) is None:
            continue
        try:
            teacher = _tokenizer_digest(folder)
        except UserError as error:
            raise UserError(f"scorers.{name}: {str(error).removeprefix('model.path: ')}") from error
        policy = _tokenizer_digest(model_folder)
        if teacher != policy:
            raise UserError(
                f"scorers.{name}: the tokenizer in {folder} (digest {teacher}) is another one than the policy's in "
                f"{model_folder} ({policy}), so the same ids are other texts to the teacher; take a teacher of the "
                "same family"
            )


def _tokenizer_digest(folder: Path) -> str:
    """A digest of a tokenizer's token ids."""
    vocabulary: dict[str, Any] = load_tokenizer(folder).get_vocab()
    return xxhash.xxh3_64_hexdigest(repr(sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))).encode())
