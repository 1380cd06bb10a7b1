"""The dashboard of the trainer."""

from __future__ import annotations

from scripts.panels.parts import Dashboard, Panel, Query, last, rate

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
