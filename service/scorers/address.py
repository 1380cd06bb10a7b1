"""Scorers behind an address: a server that answers with rewards, or a completions endpoint of vLLM.

POST {"trajectories": [..]}                           -> {"rewards": [0.5, 1.0], "info": ["why", ""]}
POST {"prompt": [10, 20], "prompt_logprobs": 0, ..}   -> {"choices": [{"prompt_logprobs": [null, {"20": ..}]}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from service.config.rollout import ScorerConfig
from service.handoff.scoring import Answer
from service.rollout.chat.outside import key_header, whole_body
from service.scorers.reply import MAX_REPLY_BYTES, Failure, ScorerFailed, answer_of
from service.scorers.scored_trajectories import Trajectory

LOGPROB_BYTES = 1 << 9
"""Maximum bytes of a token's log-probability in a JSON answer."""


class Address:
    """A scorer behind an address: posts JSON to the address and reads the JSON of the answer, within the scorer's
    deadline."""

    def __init__(self, name: str, settings: ScorerConfig) -> None:
        """Raises `UserError` if the scorer's key file contains no readable key."""
        self._url = settings.url or ""
        self._model = settings.served_model
        self._timeout = aiohttp.ClientTimeout(total=settings.deadline)
        self._headers = {"Content-Type": "application/json"} | key_header(f"scorers.{name}.key_file", settings.key_file)

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Answer:
        """Request rewards for trajectories.

        Raises:
            ScorerFailed: there was no valid answer.
        """
        given = await self._post({"trajectories": [asdict(each) for each in trajectories]}, MAX_REPLY_BYTES)
        if not isinstance(given, Mapping) or "rewards" not in given:
            raise ScorerFailed(Failure.MALFORMED, f"no object with rewards: {str(given)[:200]}")
        return answer_of((given["rewards"], given.get("info") or ()), len(trajectories))

    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """Request the log-probability of each token given the tokens before it.

        Raises:
            ScorerFailed: there was no valid answer.
        """
        question = {"prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        question |= {"model": self._model} if self._model else {}
        given = await self._post(question, MAX_REPLY_BYTES + LOGPROB_BYTES * len(token_ids))
        try:
            found = given["choices"][0]["prompt_logprobs"]
            if len(found) != len(token_ids):
                raise ValueError(f"{len(found)} log-probabilities of {len(token_ids)} tokens")
            rest = zip(token_ids[1:], found[1:], strict=True)
            return [None, *(float(of[str(token)]["logprob"]) for token, of in rest)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            detail = f"no prompt_logprobs: {type(error).__name__}: {error}"
            raise ScorerFailed(Failure.MALFORMED, detail[:200]) from error

    async def _post(self, question: Mapping[str, Any], most_bytes: int) -> Any:
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, headers=self._headers) as session,
                session.post(self._url, data=json.dumps(question, default=str), allow_redirects=False) as response,
            ):
                if (body := await whole_body(response, most_bytes)) is None:
                    raise ScorerFailed(Failure.TOO_LARGE, f"more than {most_bytes} bytes")
                if response.status != 200:
                    raise ScorerFailed(Failure.HTTP, f"status {response.status}: {body[:200].decode(errors='replace')}")
        except TimeoutError:
            raise ScorerFailed(Failure.DEADLINE, f"{self._url} did not answer") from None
        except aiohttp.ClientError as error:
            raise ScorerFailed(Failure.HTTP, f"{type(error).__name__}: {error}"[:200]) from error
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ScorerFailed(Failure.MALFORMED, f"no JSON: {error}"[:200]) from error
