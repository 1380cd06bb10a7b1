"""A teacher's log-probabilities of the sampled tokens of a group.

The steps are merged into rows, so that shared prefixes are computed once; each sampled token lies in exactly one row:

    step 0: [10 20 | 40 50]   step 1: [10 20 40 50 60 | 80]      sampled: 40 50 80
    row     [10 20 40 50 60 80]  ->  log p of each token given the tokens before it  ->  log p of 40 50 80
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from service.columns import lengths_of
from service.config.rollout import ScorerConfig
from service.errors import UserError
from service.handoff.prefixes.merge import merge_in_order
from service.handoff.prefixes.step_equality import in_order
from service.rollout.chat.tokenizer import load_tokenizer
from service.scorers.reply import Failure, Logprobs, ScorerFailed
from service.types import Float32s, Steps

ROWS_AT_ONCE = 8
"""Maximum number of a group's rows that a teacher is asked about at once."""


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
