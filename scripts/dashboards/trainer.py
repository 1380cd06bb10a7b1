"""The dashboard of the trainer."""

from __future__ import annotations

from scripts.dashboards.panels import Query, dashboard, graph, last, rate

TRAINER = dashboard(
    "baton-trainer",
    "Baton: trainer",
    "Does the optimization behave.",
    (2, 3, 3, 1),
    graph("Reward", "Mean reward of the mini-batch.", Query(last("baton_reward"), "reward")),
    graph("Loss", "Near zero by construction.", Query(last("baton_policy_loss"), "loss")),
    graph(
        "Entropy", "Entropy of the policy. A sudden fall is a collapse.", Query(last("baton_policy_entropy"), "entropy")
    ),
    graph(
        "Divergence",
        "Between trainer and sampling policy. On fresh tokens it is near zero; more is a mismatch of engine "
        "and trainer.",
        Query(last("baton_policy_kl"), "all tokens"),
        Query(last("baton_fresh_token_kl"), "fresh tokens"),
    ),
    graph(
        "Importance ratio",
        "Mean of trainer over sampling probability; far from 1 when the data is too stale.",
        Query(last("baton_importance_ratio_mean"), "mean"),
    ),
    graph(
        "Clipped",
        "Fraction of loss tokens that are clipped.",
        Query(last("baton_clip_ratio"), "fraction"),
        unit="percentunit",
    ),
    graph("Gradient norm", "Before clipping.", Query(last("baton_grad_norm"), "norm")),
    graph("Learning rate", "Of the last step.", Query(last("baton_learning_rate"), "lr")),
    graph(
        "Steps",
        "Optimizer steps a second. An aborted step changes nothing, and its batch is leased again.",
        Query(rate("baton_optimizer_steps_total"), "applied"),
        Query(rate("baton_aborted_steps_total"), "aborted"),
    ),
)
