"""The token that ends a turn: appended where the policy sampled none, and never trained.

sampled       appended         columns of the response
look fox      <|im_end|>       token_ids   [look fox <|im_end|>]
                               logprobs    [ -.1 -.4      0    ]
                               loss_mask   [   1   1      0    ]
                               versions    [   7   7     -1    ]   (NO_VERSION)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.rollout.engine import Generation
from service.types import NO_VERSION, Bools, Float32s, Int32s, Int64s


class Response(NamedTuple):
    """The response of one turn as columns [T]: the sampled tokens, and an appended end."""

    token_ids: Int32s
    logprobs: Float32s
    loss_mask: Bools
    """True for sampled tokens."""
    versions: Int64s


def as_sampled(generation: Generation) -> Response:
    """The response exactly as the policy sampled it."""
    mask = np.ones(len(generation.token_ids), np.bool_)
    return Response(generation.token_ids, generation.logprobs, mask, generation.versions)


def without_loss(response: Response) -> Response:
    """The response as one that the policy did not sample."""
    return response._replace(loss_mask=np.zeros_like(response.loss_mask))


def with_end(generation: Generation, end_id: int) -> Response:
    """The response, with `end_id` appended unless the policy sampled an end itself."""
    response = as_sampled(generation)
    if generation.sampled_end:
        return response
    return Response(
        np.append(response.token_ids, np.int32(end_id)),
        np.append(response.logprobs, np.float32(0.0)),
        np.append(response.loss_mask, False),
        np.append(response.versions, np.int64(NO_VERSION)),
    )
