"""What each panel of the Grafana dashboards asks and means."""

from __future__ import annotations

from typing import Literal, NamedTuple

RUN = '{instance=~"$instance"}'


class Query(NamedTuple):
    """One PromQL expression and how its series are named."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """A panel: its title, unit, queries, and what it means."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    meaning: str
    width: int = 12
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    stacked: bool = False


class Dashboard(NamedTuple):
    """A page of panels."""

    uid: str
    title: str
    meaning: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "") -> str:
    """Per second, over all actors of a run."""
    return f"sum by (instance{', ' + by if by else ''}) (rate({name}{RUN}[$__rate_interval]))"


def last(name: str) -> str:
    """A gauge of a run that one actor sets."""
    return f"max by (instance) ({name}{RUN})"


def mean(name: str) -> str:
    """The mean of a histogram's observations."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram, as exact as its buckets."""
    return f"histogram_quantile({share}, {rate(name + '_bucket', 'le')})"


def share(part_name: str, whole_name: str) -> str:
    """One counter's growth as a share of another's."""
    return f"{rate(part_name)} / {rate(whole_name)}"


def part(part_name: str, whole_name: str) -> str:
    """One gauge as a part of another."""
    return f"{last(part_name)} / {last(whole_name)}"


def mean_and_worst(name: str) -> tuple[Query, ...]:
    """Mean and 99 % of a histogram."""
    return Query(mean(name), "mean"), Query(quantile(0.99, name), "99 %")


def spread(name: str) -> tuple[Query, ...]:
    """Median, 99 % and mean of a histogram."""
    return Query(quantile(0.5, name), "median"), Query(quantile(0.99, name), "99 %"), Query(mean(name), "mean")


OVERVIEW = Dashboard(
    "baton-overview",
    "Baton: overview",
    "Is the run alive, does it learn, and who waits for whom.",
    (
        Panel("Step", "none", (Query(last("baton_policy_version")),), "Optimizer steps so far.", 4, "stat"),
        Panel("Reward", "none", (Query(last("baton_reward")),), "Mean reward of the last mini-batch.", 4, "stat"),
        Panel(
            "Since the last step",
            "s",
            (Query(f"time() - {last('baton_last_optimizer_step_timestamp_seconds')}"),),
            "Half of the stall deadline fires BatonTrainerStalled.",
            4,
            "stat",
        ),
        Panel(
            "Generators",
            "none",
            (Query('sum by (instance) (baton_actor_up{instance=~"$instance", role="generator"})'),),
            "Generators that push numbers.",
            4,
            "stat",
        ),
        Panel(
            "Trainer waits",
            "percentunit",
            (Query(share("baton_trainer_wait_seconds_sum", "baton_step_seconds_sum")),),
            "High: generation is the bottleneck.",
            4,
            "stat",
        ),
        Panel(
            "Padded length",
            "none",
            (Query(last("baton_batch_padded_sequence_length_last_tokens")),),
            "Tokens to which the last batch is padded, or would be.",
            4,
            "stat",
        ),
        Panel("Reward over time", "none", (Query(last("baton_reward"), "{{instance}}"),), "Before any filter."),
        Panel(
            "Seconds a step",
            "s",
            (
                Query(mean("baton_step_seconds"), "step"),
                Query(share("baton_trainer_wait_seconds_sum", "baton_step_seconds_count"), "of which waiting"),
            ),
            "The time between two optimizer steps, and the trainer's share of waiting in it.",
        ),
        Panel(
            "Staleness",
            "none",
            (*spread("baton_staleness_versions"), Query(last("baton_staleness_budget_versions"), "budget")),
            "Versions between sampling and training of a loss token. Tokens beyond the budget carry no loss.",
        ),
        Panel(
            "Tokens a second",
            "none",
            (
                Query(rate("baton_generated_tokens_total"), "sampled"),
                Query(rate("baton_batch_sampled_tokens_total"), "trained"),
            ),
            "What the engines sample and what the trainer uses; the gap is waste or growth of the buffer.",
        ),
        Panel(
            "Actors heard",
            "s",
            (Query(f"baton_actor_age_seconds{RUN}", "{{ident}}"),),
            "Seconds since each actor pushed its numbers; over 10 it counts as silent.",
        ),
        Panel(
            "Memory",
            "bytes",
            (Query(f"baton_process_resident_memory_bytes{RUN}", "{{ident}}"),),
            "Resident memory of each actor's process.",
        ),
    ),
)

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

BUFFER = Dashboard(
    "baton-buffer",
    "Baton: buffer and staleness",
    "What is open, how old it gets, and what was turned away.",
    (
        Panel(
            "Groups by state",
            "none",
            (
                Query(
                    'sum by (state) (baton_buffer_groups{instance=~"$instance", state=~"issued|open|complete|leased"})',
                    "{{state}}",
                ),
            ),
            "Work in flight. All waiting in `complete`: the trainer is the bottleneck; none there: generation is.",
            stacked=True,
        ),
        Panel(
            "Staleness, distribution",
            "none",
            (Query(rate("baton_staleness_versions_bucket", "le"), "{{le}}"),),
            "Loss tokens by the versions between sampling and training.",
            kind="heatmap",
        ),
        Panel(
            "Too stale",
            "percentunit",
            (Query(share("baton_batch_stale_tokens_total", "baton_batch_sampled_tokens_total"), "masked"),),
            "Share of sampled tokens that were older than the budget and carried no loss.",
            8,
        ),
        Panel(
            "Reserved",
            "percentunit",
            (
                Query(part("baton_buffer_reserved_bytes", "baton_buffer_limit_bytes"), "memory"),
                Query(part("baton_journal_bytes", "baton_journal_limit_bytes"), "journal"),
            ),
            "Of buffer.max_bytes (the worst case of open groups) and of buffer.max_journal_bytes.",
            8,
        ),
        Panel(
            "Trainer waits",
            "s",
            (
                Query(mean("baton_trainer_wait_seconds"), "mean"),
                Query(quantile(0.99, "baton_trainer_wait_seconds"), "99 %"),
            ),
            "Seconds that the trainer waited for a mini-batch.",
            8,
        ),
        Panel(
            "Accepted",
            "none",
            (Query(rate("baton_accepted_tokens_total"), "tokens"),),
            "Tokens accepted a second.",
            8,
        ),
        Panel(
            "Refused",
            "none",
            (Query(rate("baton_refused_steps_total", "reason"), "{{reason}}"),),
            "Messages a second that were turned away at the door, by reason.",
            8,
        ),
        Panel(
            "Restarted",
            "none",
            (Query(rate("baton_restarted_trajectories_total", "reason"), "{{reason}}"),),
            "Trajectories that began anew as their next attempt.",
            8,
        ),
    ),
)

GENERATORS = Dashboard(
    "baton-generators",
    "Baton: generators",
    "What the engines do, what they wait for, and how new weights reach them.",
    (
        Panel(
            "Tokens a second",
            "none",
            (Query(rate("baton_generated_tokens_total", "ident"), "{{ident}}"),),
            "Sampled tokens of each engine.",
        ),
        Panel(
            "Running turns",
            "none",
            (Query(f"baton_generator_running_requests{RUN}", "{{ident}}"),),
            "Turns that each engine is generating.",
        ),
        Panel(
            "Waiting for work",
            "percentunit",
            (Query(rate("baton_generator_wait_seconds_sum", "ident, reason"), "{{ident}} {{reason}}"),),
            "Share of time, by reason: `lookahead` waits for the trainer, `bytes` for memory, `disk` for the journal.",
        ),
        Panel(
            "Versions behind",
            "none",
            (
                Query(
                    last("baton_policy_version")
                    + f" - on (instance) group_right () baton_generator_policy_version{RUN}",
                    "{{ident}}",
                ),
            ),
            "The trainer's version minus the one that an engine serves.",
        ),
        Panel(
            "Weight updates",
            "s",
            (
                Query(mean("baton_weight_sync_seconds"), "mean"),
                Query(quantile(0.99, "baton_weight_sync_seconds"), "99 %"),
            ),
            "Seconds from sending weights until every engine serves them.",
            8,
        ),
        Panel(
            "Pause for weights",
            "s",
            (Query(mean("baton_weight_sync_pause_seconds"), "mean"),),
            "Seconds that an engine stands still for one update.",
            8,
        ),
        Panel(
            "Failures",
            "none",
            (
                Query(rate("baton_weight_sync_failures_total"), "weight updates"),
                Query(rate("baton_environment_errors_total", "env"), "environment {{env}}"),
            ),
            "Failed updates, and trajectories that ended because their environment failed, a second.",
            8,
        ),
        Panel(
            "How trajectories end",
            "none",
            (Query(rate("baton_completed_trajectories_total", "stop_reason"), "{{stop_reason}}"),),
            "Completed trajectories a second, by stop reason.",
            24,
            stacked=True,
        ),
    ),
)

TRAINER = Dashboard(
    "baton-trainer",
    "Baton: trainer",
    "Does the optimization behave.",
    (
        Panel("Reward", "none", (Query(last("baton_reward"), "reward"),), "Mean reward of the mini-batch."),
        Panel("Loss", "none", (Query(last("baton_policy_loss"), "loss"),), "Near zero by construction."),
        Panel(
            "Entropy",
            "none",
            (Query(last("baton_policy_entropy"), "entropy"),),
            "A cliff is collapse.",
            8,
        ),
        Panel(
            "Divergence",
            "none",
            (Query(last("baton_policy_kl"), "all tokens"), Query(last("baton_fresh_token_kl"), "fresh tokens")),
            "Of trainer from sampling policy. On fresh tokens near zero: more is a mismatch of engine and trainer.",
            8,
        ),
        Panel(
            "Importance ratio",
            "none",
            (Query(last("baton_importance_ratio_mean"), "mean"),),
            "Mean of trainer over sampling probability; leaves 1 when the data is too stale.",
            8,
        ),
        Panel(
            "Clipped",
            "percentunit",
            (Query(last("baton_clip_ratio"), "share"),),
            "Loss tokens that are clipped.",
            8,
        ),
        Panel("Gradient norm", "none", (Query(last("baton_grad_norm"), "norm"),), "Before clipping.", 8),
        Panel("Learning rate", "none", (Query(last("baton_learning_rate"), "lr"),), "Of the last step.", 8),
        Panel(
            "Steps",
            "none",
            (
                Query(rate("baton_optimizer_steps_total"), "applied"),
                Query(rate("baton_aborted_steps_total"), "aborted"),
            ),
            "Optimizer steps a second; an aborted one changes nothing and its batch is leased again.",
            24,
        ),
    ),
)

LEDGER = Dashboard(
    "baton-ledger",
    "Baton: token ledger",
    "Where every accepted token is.",
    (
        Panel(
            "Tokens by fate",
            "none",
            (Query('sum by (fate) (baton_tokens{instance=~"$instance"})', "{{fate}}"),),
            "Every accepted token has exactly one fate; the sum is the accepted tokens.",
            24,
            stacked=True,
        ),
        Panel(
            "Does the ledger close?",
            "none",
            (
                Query(
                    'sum by (instance) (baton_tokens{instance=~"$instance"}) - '
                    'sum by (instance) (baton_accepted_tokens_total{instance=~"$instance"})',
                    "difference",
                ),
            ),
            "Must be 0 at every scrape.",
            8,
            "stat",
        ),
        Panel(
            "Used",
            "percentunit",
            (
                Query(
                    'sum by (instance) (baton_tokens{instance=~"$instance", fate=~"trained|stepped"}) / '
                    'sum by (instance) (baton_tokens{instance=~"$instance", fate!="open"})',
                    "share",
                ),
            ),
            "Share of the tokens whose fate is decided that an optimizer step used.",
            8,
            "stat",
        ),
        Panel(
            "Lost",
            "none",
            (Query('sum by (fate) (baton_tokens{instance=~"$instance", fate!~"open|trained|stepped"})', "{{fate}}"),),
            "Tokens that no optimizer step will use, by why.",
            8,
        ),
    ),
)

DASHBOARDS = (OVERVIEW, SEQUENCES, BUFFER, GENERATORS, TRAINER, LEDGER)
