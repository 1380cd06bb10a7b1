"""Metrics computed while a mini-batch is formed: its rewards, merge, row lengths, padding, turns, staleness,
tokens, and the means of environments' numbers (`info`).

`generate/batch_padded_seq_len` is the padded length: the length to which all rows would be padded in one array.

    rows of 6, 5 and 3 tokens   ->   padded length 6, 14 tokens, padding ratio 1 - 14 / (3 * 6)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import lengths_of
from service.handoff.batches.estimators import ROUNDING, ranges
from service.handoff.batches.pack import Placement
from service.handoff.ledger.events import Fate, GroupStats
from service.handoff.steps.info import INFOS, MAX_INFO_NAMES
from service.handoff.steps.tables import by_turn, is_truncated_K
from service.types import Ends, Float64s, Int32s, Int64s, MicroBatch, Rows, Steps


def merge_metrics(counts: dict[str, int]) -> dict[str, float]:
    """Metrics from `MergedRows.counts`."""
    return {
        "generate/num_seq_before_merge": counts["steps"],
        "generate/num_seq_after_merge": counts["rows"],
        "generate/batch_num_seq": counts["rows"],
        "generate/merge_ratio": counts["steps"] / max(counts["rows"], 1),
        "generate/tokens_before_merge": counts["tokens_before"],
        "generate/tokens_after_merge": counts["tokens_after"],
        "generate/prefix_mismatches": counts["forked"] + counts["reset"],
        **{f"generate/steps_{outcome}": counts[outcome] for outcome in ("extended", "forked", "reset")},
    }


def length_metrics(length_R: Int64s, placement: Placement, ranks: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
    """Metrics of row lengths before packing, of the padded length after packing, and of the imbalance between ranks."""
    longest = int(length_R.max(initial=0))
    batches = [micro for rank in ranks for micro in rank if micro.trajectory_of_row_R[0] >= 0]  # -1: a dummy
    padded = max((int(lengths_of(micro.offsets_R).max()) for micro in batches), default=0)
    total = int(length_R.sum())
    return {
        "generate/batch_padded_seq_len": padded,
        "generate/batch_longest_row": longest,
        "generate/batch_padding_ratio": 1 - total / (padded * len(length_R)) if total else 0.0,
        "generate/batch_num_tokens": total,
        "generate/batch_imbalance": placement.imbalance,
        "generate/batch_num_micro_batches": sum(len(rank) for rank in placement.ranks),
        "generate/batch_num_dummies": sum(not rows for rank in placement.ranks for rows in rank),
    }


def turn_metrics(rows: Rows, steps: Steps, count: int) -> dict[str, float]:
    """Metrics of turns: lengths of responses, truncated fractions, and means over the `count` trajectories."""
    responses = len(rows.token_ids_N) - int(rows.prompt_length_R.sum())
    length_K = lengths_of(steps.offsets_K) - steps.prompt_length_K
    measures: dict[str, Any] = {"avg": np.mean, "std": np.std, "min": np.min, "max": np.max} if len(steps) else {}
    return {
        **{f"generate/{name}_response_length": float(measure(length_K)) for name, measure in measures.items()},
        "generate/avg_num_tokens": responses / max(count, 1),
        "generate/avg_assistant_tokens": int(np.count_nonzero(steps.loss_mask_N)) / max(count, 1),
        "generate/avg_num_turns": len(steps) / max(count, 1),
        "generate/truncated_ratio": float(is_truncated_K(steps).mean()) if len(steps) else 0.0,
        **{f"generate/truncated_ratio_turn_{turns}": n_cut / n for turns, n, n_cut in by_turn([steps])},
    }


def staleness_metrics(staleness_N: Int32s, sampled_G: Int64s, stale_G: Int64s) -> dict[str, float]:
    """Metrics of staleness. Stale tokens are also counted by quarter of the trajectories (1: shortest, 4: longest)."""
    sampled = int(np.count_nonzero(staleness_N >= 0))
    ages = int(staleness_N.sum(dtype=np.int64)) + len(staleness_N) - sampled  # tokens that were not sampled count as -1
    quarters = np.array_split(stale_G[np.argsort(sampled_G, kind="stable")], 4)
    return {
        "async/staleness_mean": ages / max(sampled, 1),
        "async/staleness_max": float(staleness_N.max(initial=0)),
        "async/stale_tokens": float(stale_G.sum()),
        **{f"async/stale_tokens_quarter_{q}": float(part.sum()) for q, part in enumerate(quarters, 1)},
    }


def token_metrics(
    steps: Steps, loss_G: Int64s, stale_G: Int64s, untrained_P: Sequence[dict[Fate, int]]
) -> dict[str, float]:
    """Number of sampled tokens by outcome: sampled = loss + stale + untrained + masked."""
    sampled, loss, stale = float(np.count_nonzero(steps.loss_mask_N)), float(loss_G.sum()), float(stale_G.sum())
    untrained = float(sum(sum(tokens.values()) for tokens in untrained_P))
    return {
        "tokens/sampled": sampled,
        "tokens/loss": loss,
        "tokens/stale": stale,
        "tokens/untrained": untrained,
        "tokens/masked": sampled - loss - stale - untrained,
    }


def group_stats(return_G: Float64s, group_G: NDArray[np.integer[Any]]) -> GroupStats:
    """Counts and sums of the returns of complete groups, from which metrics are made."""
    low_P, high_P, flat_P = ranges(return_G, group_G)
    counts = (flat_P, *(flat_P & (np.abs(low_P - value) <= ROUNDING) for value in (0, 1)))
    flat, zeros, ones = (int(np.count_nonzero(of_P)) for of_P in counts)
    return GroupStats(
        len(low_P), len(return_G), float(return_G.sum()), int(np.count_nonzero(high_P > ROUNDING)), flat, zeros, ones
    )


def reward_metrics(trained: GroupStats, filtered: GroupStats | None = None) -> dict[str, float]:
    """Metrics of returns, over the trained groups and those that filters removed."""
    every = trained if filtered is None else trained + filtered
    if not trained.groups:
        return {}
    return {
        "reward/avg_raw_reward": every.return_sum / every.trajectories,
        # Rounded up, because some trajectories may be lost: the name must not change between steps.
        f"reward/avg_pass_at_{-(-trained.trajectories // trained.groups)}": every.passed / every.groups,
        "reward/groups_without_variance": every.flat / every.groups,
        "reward/groups_all_zero": every.zeros / every.groups,
        "reward/groups_all_one": every.ones / every.groups,
        "generate/filtered_groups": float(every.groups - trained.groups),
    }


def info_means(ends: Ends) -> dict[str, float]:
    """The means over the trajectories of each environment, named `environment/<environment>/<name>`. A trajectory whose
    `info` lacks the name counts as 0; a number that is not finite does not count.

    {"search_r1": {"searches": 2}}  {"search_r1": {"searches": 1}}   ->   environment/search_r1/searches 1.5
    """
    count, sums = Counter[str](), dict[str, Counter[str]]()
    uncounted = Counter[tuple[str, str]]()
    for code, times in Counter(ends.info_E.tolist()).items():
        for environment, info in INFOS.decode(ends.infos[code] or "{}").items():
            count[environment] += times
            of = sums.setdefault(environment, Counter())
            for name, number in info.items():
                if number is None:
                    uncounted[environment, name] += times
                elif name in of or len(of) < MAX_INFO_NAMES:
                    of[name] += times * number  # type: ignore[assignment]
    return {
        f"environment/{environment}/{name}": total / (count[environment] - uncounted[environment, name])
        for environment, of in sums.items()
        for name, total in of.items()
    }
