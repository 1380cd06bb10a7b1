"""The dashboard of sequence lengths and padding."""

from __future__ import annotations

from scripts.panels.parts import Dashboard, Panel, Query, last, part, rate, share, spread

SEQUENCES = Dashboard(
    "baton-sequences",
    "Baton: sequences and padding",
    "How long rows are, what padding costs, and whether steps merge.",
    (
        Panel(
            "Padded length of mini-batches",
            "none",
            (
                *spread("baton_batch_padded_sequence_length_tokens"),
                Query(last("baton_batch_padded_sequence_length_alert_tokens"), "alert threshold"),
            ),
            "Left-padded whole sequences, so the padded length is that of the longest row.",
        ),
        Panel(
            "Share of long mini-batches",
            "percentunit",
            (Query('instance:baton_long_batches:ratio_rate15m{instance=~"$instance"}', "{{instance}}"),),
            "Exact fraction of batches beyond the alert threshold (a recording rule of rules.yaml).",
        ),
        Panel(
            "Inflation",
            "none",
            (
                Query(
                    part("baton_batch_padded_sequence_length_last_tokens", "baton_batch_longest_row_tokens"),
                    "padded / longest",
                ),
            ),
            "Must be 1: more is a defect of the layout.",
            8,
        ),
        Panel(
            "Padding",
            "percentunit",
            (
                Query(share("baton_batch_padding_tokens_total", "baton_batch_tokens_total"), "mean"),
                Query(last("baton_batch_padding_ratio"), "last batch"),
            ),
            "Share of positions without a token. With the packed layout nothing of it is computed.",
            8,
        ),
        Panel(
            "Rows a step",
            "percentunit",
            (
                Query(share("baton_rows_after_merge_total", "baton_rows_before_merge_total"), "rows / steps"),
                Query(share("baton_prefix_mismatch_total", "baton_rows_before_merge_total"), "mismatches"),
            ),
            "Low rows per step is merging at work; mismatches are steps that do not extend their predecessor.",
            8,
        ),
        Panel("Row length", "none", spread("baton_row_length_tokens"), "Training rows, after merging."),
        Panel("Turns", "none", spread("baton_trajectory_turns"), "Turns of completed trajectories."),
        Panel("Prompt of a step", "none", spread("baton_step_prompt_length_tokens"), "The whole prompt of a turn."),
        Panel("Response of a step", "none", spread("baton_step_response_length_tokens"), "What a turn generated."),
        Panel(
            "Row lengths, distribution",
            "none",
            (Query(rate("baton_row_length_tokens_bucket", "le"), "{{le}}"),),
            "Where the lengths lie; a second band far above the first makes padding expensive.",
            24,
            "heatmap",
        ),
    ),
)
