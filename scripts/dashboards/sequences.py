"""The dashboard of sequence lengths and padding."""

from __future__ import annotations

from scripts.dashboards.panels import (
    Query,
    chosen,
    dashboard,
    distribution,
    graph,
    heatmap,
    last,
    last_ratio,
    rate_ratio,
)

INFLATION = last_ratio("baton_batch_padded_sequence_length_last_tokens", "baton_batch_longest_row_tokens")

SEQUENCES = dashboard(
    "baton-sequences",
    "Baton: sequences and padding",
    "The lengths of rows, the cost of padding, and whether steps merge.",
    (2, 3, 2, 2, 1),
    graph(
        "Padded length of mini-batches",
        "Whole sequences are padded on the left, so the padded length is the length of the longest row.",
        *distribution("baton_batch_padded_sequence_length_tokens"),
        Query(last("baton_batch_padded_sequence_length_alert_tokens"), "alert threshold"),
    ),
    graph(
        "Fraction of long mini-batches",
        "Exact fraction of batches beyond the alert threshold (a recording rule of rules.yaml).",
        Query(chosen("instance:baton_long_batches:ratio_rate15m"), "{{instance}}"),
        unit="percentunit",
    ),
    graph("Inflation", "Must be 1: more is a defect of the layout.", Query(INFLATION, "padded / longest")),
    graph(
        "Padding",
        "Fraction of positions without a token. The packed layout computes none of them.",
        Query(rate_ratio("baton_batch_padding_tokens_total", "baton_batch_tokens_total"), "mean"),
        Query(last("baton_batch_padding_ratio"), "last batch"),
        unit="percentunit",
    ),
    graph(
        "Rows a step",
        "Few rows per step mean that steps merge; mismatches are steps that do not extend the previous one.",
        Query(rate_ratio("baton_rows_after_merge_total", "baton_rows_before_merge_total"), "rows / steps"),
        Query(rate_ratio("baton_prefix_mismatch_total", "baton_rows_before_merge_total"), "mismatches"),
        unit="percentunit",
    ),
    graph("Row length", "Training rows, after merging.", *distribution("baton_row_length_tokens")),
    graph("Turns", "Turns of completed trajectories.", *distribution("baton_trajectory_turns")),
    graph("Prompt of a step", "The whole prompt of a turn.", *distribution("baton_step_prompt_length_tokens")),
    graph("Response of a step", "The response of a turn.", *distribution("baton_step_response_length_tokens")),
    heatmap(
        "Row lengths, distribution",
        "The lengths of training rows. A second band far above the first makes padding expensive.",
        "baton_row_length_tokens",
    ),
)
