"""The rows of a proof: shared prefixes, a fork inside a row, a row of one token, rows longer than a chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from service.types import Float64s, MicroBatch

SEED = 35


@dataclass(frozen=True)
class ProofRows:
    """Rows of tokens with a temperature each, and a factor of each token's log-probability in the loss."""

    token_ids: list[Tensor]
    temperatures: list[float]
    factors: list[Float64s]

    @classmethod
    def of(cls, vocab_size: int) -> ProofRows:
        """Six rows of 1 to 106 tokens, four of which begin alike."""
        rng = np.random.default_rng(SEED)

        def new(n_tokens: int) -> list[int]:
            return [int(token) for token in rng.integers(0, vocab_size, n_tokens)]

        prompt, begun = new(70), new(20)
        rows = [prompt + new(9), new(37), prompt + begun + new(16), prompt + begun + new(5), new(1), prompt + new(2)]
        factors = [rng.normal(size=len(row)) for row in rows]
        return cls([torch.tensor(row) for row in rows], [1.0, 0.7, 1.0, 0.7, 1.0, 1.3], factors)

    def packed(self) -> MicroBatch:
        """All rows as a micro-batch in which every token but the first of a row carries loss."""
        lengths = [len(row) for row in self.token_ids]
        n_tokens, offsets_R = sum(lengths), np.cumsum([0, *lengths])
        mask = np.ones(n_tokens, bool)
        mask[offsets_R[:-1]] = False
        return MicroBatch(
            token_ids_N=torch.cat(self.token_ids).numpy().astype(np.int32),
            offsets_R=offsets_R,
            loss_mask_N=mask,
            logprobs_N=np.zeros(n_tokens, np.float32),
            staleness_N=np.zeros(n_tokens, np.int32),
            temperature_R=np.array(self.temperatures, np.float32),
            trajectory_of_row_R=np.arange(len(lengths), dtype=np.int32),
        )

    @property
    def factor_N(self) -> Tensor:
        """[N] the factor of each packed token."""
        return torch.from_numpy(np.concatenate(self.factors))
