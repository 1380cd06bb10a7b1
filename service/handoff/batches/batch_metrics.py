"""The metrics of a mini-batch, each function one family.

`generate/batch_padded_seq_len` is the padded length: the length of every row if all rows lay in one rectangle.

    rows of 6, 5 and 3 tokens   ->   padded length 6, 14 tokens, padding ratio 1 - 14 / (3 * 6)
"""

from __future__ import annotations

import numpy as np

from service.handoff.batches.pack import Placement
from service.handoff.steps.truncation import by_turn, is_truncated_K
from service.types import Float64s, Int32s, Int64s, Rows, Steps


def merge_metrics(counts: dict[str, int]) -> dict[str, float]:
    """Steps before and rows after the merge, and how each step joined its row (`Merged.counts`)."""
    return {
        "generate/num_seq_before_merge": counts["steps"],
        "generate/num_seq_after_merge": counts["rows"],
        "generate/batch_num_seq": counts["rows"],
        "generate/merge_ratio": counts["steps"] / max(counts["rows"], 1),
        "generate/tokens_before_merge": counts["tokens_before"],
        "generate/tokens_after_merge": counts["tokens_after"],
        "generate/prefix_mismatches": counts["forked"] + counts["realigned"] + counts["reset"],
        **{f"generate/steps_{outcome}": counts[outcome] for outcome in ("extended", "forked", "realigned", "reset")},
        "generate/realigned_tokens": counts["realigned_tokens"],
    }


def length_metrics(length_R: Int64s, placement: Placement) -> dict[str, float]:
    """Lengths of the rows, the padded length among them, and how evenly the rows are placed."""
    longest = int(length_R.max(initial=0))
    total = int(length_R.sum())
    return {
        "generate/batch_padded_seq_len": longest,
        "generate/batch_longest_row": longest,
        "generate/batch_padding_ratio": 1 - total / (longest * len(length_R)) if total else 0.0,
        "generate/batch_num_tokens": total,
        "generate/batch_imbalance": placement.imbalance,
        "generate/batch_num_micro_batches": sum(len(rank) for rank in placement.ranks),
        "generate/batch_num_dummies": sum(not rows for rank in placement.ranks for rows in rank),
    }


def reward_metrics(return_G: Float64s, prompt_G: Int32s) -> dict[str, float]:
    """Mean return, and the fraction of prompts of which a sample has a positive one."""
    if not len(return_G):
        return {}
    passed_P = np.bincount(prompt_G, return_G > 0) > 0
    samples = round(len(return_G) / len(passed_P))
    return {
        "reward/avg_raw_reward": float(return_G.mean()),
        "reward/mean_positive_reward": float(np.maximum(return_G, 0).mean()),
        f"reward/avg_pass_at_{samples}": float(passed_P.mean()),
    }


def turn_metrics(rows: Rows, steps: Steps, count: int) -> dict[str, float]:
    """Per trajectory its turns, its tokens after first prompts, and its sampled tokens; the share of cut responses."""
    cut = {turns: n_truncated / n for turns, n, n_truncated in by_turn([steps])}
    responses = len(rows.token_ids_N) - int(rows.prompt_length_R.sum())
    return {
        "generate/avg_num_tokens": responses / max(count, 1),
        "generate/avg_assistant_tokens": int(np.count_nonzero(steps.loss_mask_N)) / max(count, 1),
        "generate/avg_num_turns": len(steps) / max(count, 1),
        "generate/truncated_ratio": float(is_truncated_K(steps).mean()) if len(steps) else 0.0,
        **{f"generate/truncated_ratio_turn_{turns}": ratio for turns, ratio in cut.items()},
    }


def staleness_metrics(staleness_N: Int32s, sampled_G: Int64s, stale_G: Int64s) -> dict[str, float]:
    """Staleness of sampled tokens; the stale ones also by the length of their trajectory (quarter 4: the longest)."""
    sampled = int(np.count_nonzero(staleness_N >= 0))
    ages = int(staleness_N.sum(dtype=np.int64)) + len(staleness_N) - sampled  # each other token counts as -1
    quarters = np.array_split(stale_G[np.argsort(sampled_G, kind="stable")], 4)
    return {
        "async/staleness_mean": ages / max(sampled, 1),
        "async/staleness_max": float(staleness_N.max(initial=0)),
        "async/stale_tokens": float(stale_G.sum()),
        **{f"async/stale_tokens_quarter_{q}": float(part.sum()) for q, part in enumerate(quarters, 1)},
    }


def token_metrics(steps: Steps, loss_tokens_G: Int64s, stale_G: Int64s) -> dict[str, float]:
    """Sampled tokens by what became of them: sampled = loss + stale + masked."""
    sampled, loss, stale = float(np.count_nonzero(steps.loss_mask_N)), float(loss_tokens_G.sum()), float(stale_G.sum())
    return {
        "tokens/sampled": sampled,
        "tokens/loss": loss,
        "tokens/stale": stale,
        "tokens/masked": sampled - loss - stale,
    }
