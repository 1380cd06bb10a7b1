"""The keys of a line of `metrics.jsonl`, which trackers show too, with their meaning.

The keys of which there is also a Prometheus metric are those of `metrics_table`; this table has the others. In
step-wise training a mean is over trajectories unless the key says otherwise. `<...>` in a key stands for a name.
"""

from __future__ import annotations

from service.observe.metrics_table import TABLE

_RATIO = {
    "is_ratio_mean": "Mean importance ratio",
    "is_ratio_std": "Standard deviation of the importance ratios",
    "is_ratio_max": "Largest importance ratio",
    "effective_sample_fraction": "Effective sample size by the importance ratios, (sum r)^2 / (n sum r^2), 0 to 1,",
}
_AT_STALENESS = "of the loss tokens at this staleness: `<versions>` is `0`, `1`, `2`, `3_4`, `5_8` or `9_up`."

MAX_INFO_NAMES = 64
"""Maximum number of names in an environment's `info` whose means are kept, so that new names take bounded memory."""

STEP_KEYS: dict[str, str] = {
    "trainer/incarnation": "Incarnation of the trainer; with the step it is the policy's version.",
    "reward/mean_positive_reward": "Mean of the returns of the mini-batch, negative ones counted as 0.",
    "reward/avg_pass_at_<n>": "Fraction of groups, filtered ones too, in whose `<n>` samples a return is positive.",
    "reward/scored_turns": "With credit by turn: fraction of turns after which the environment scored the state.",
    "reward/groups_without_credit": "With credit by turn: fraction of groups in which every advantage is 0.",
    "role/<role>/reward": "With `roles`: mean return of a role, over the trajectories in which it had a turn.",
    "role/<role>/turns": "Mean turns of the role in those.",
    "role/<role>/groups_without_credit": "Fraction of groups in which every advantage of the role is 0.",
    "generate/batch_num_seq": "Rows of the mini-batch.",
    "generate/batch_num_tokens": "Tokens of the mini-batch's rows.",
    "generate/merge_ratio": "Steps for each row: how many turns share a row on average.",
    "generate/tokens_before_merge": "Tokens that the rows would have without merging.",
    "generate/tokens_after_merge": "Tokens of the merged rows.",
    "generate/steps_extended": "Steps that extended the row of the step before them.",
    "generate/steps_forked": "Steps that began another row because they left the sampled text of an earlier one.",
    "generate/steps_reset": "Steps that began another row because they share at most a first prompt.",
    "generate/batch_imbalance": "Cost of the most loaded rank, over the mean cost of a rank.",
    "generate/batch_computed_ratio": (
        "Computed over all tokens of the rows, where shared prefixes are computed once; more than "
        "`generate/batch_distinct_ratio` by what ranks and micro-batches compute again."
    ),
    "generate/batch_num_micro_batches": "Micro-batches of all ranks.",
    "generate/batch_num_dummies": "Micro-batches without tokens, which give every rank the same number.",
    "generate/filtered_groups": "Groups that filters removed since the mini-batch before.",
    "generate/filtered_tokens": "Sampled tokens of those groups.",
    "generate/tokens_per_kept_token": "Sampled tokens, those of filtered groups too, over the mini-batch's own.",
    "generate/avg_num_tokens": "Mean tokens of a trajectory after its first prompts, observations included.",
    "generate/avg_assistant_tokens": "Mean tokens of a trajectory that the policy sampled.",
    "generate/avg_num_turns": "Mean turns of a trajectory.",
    "generate/truncated_ratio_turn_<turns>": (
        "The same, of the responses of some turns: `<turns>` is `1`, `2`, `3`, `4`, `5_8`, `9_16`, `17_32` or `33_up`."
    ),
    "tokens/loss": "Sampled tokens that carry loss.",
    "tokens/untrained": "Sampled tokens without loss because of the role of their step (`agents.train`, `roles`).",
    "tokens/masked": "Sampled tokens that carry no loss for another reason than their staleness or their step's role.",
    "async/staleness_max": "Largest staleness of a token of the mini-batch that a policy sampled.",
    "async/stale_tokens": "Tokens too stale to carry loss.",
    "async/stale_tokens_quarter_<q>": "The same, of a quarter of the trajectories by length; 4 has the longest.",
    "async/trainer_wait_fraction": "Fraction of the training's time for which the trainer waited.",
    "async/generator_wait_fraction": "Fraction of their time for which the generators waited for work.",
    "policy/is_ratio_std": f"{_RATIO['is_ratio_std']} of the loss tokens.",
    "policy/is_ratio_max": f"{_RATIO['is_ratio_max']} of a loss token.",
    "policy/effective_sample_fraction": f"{_RATIO['effective_sample_fraction']} of the loss tokens.",
    "policy/loss_metrics/masked_ratio": "Fraction of loss tokens whose loss a correction set to 0.",
    "policy/loss_metrics/truncated_ratio": "Fraction of loss tokens whose importance weight was truncated.",
    "policy/reference_kl": "Approximate divergence from the reference weights (`algorithm.kl_coef`).",
    "policy/teacher_kl": (
        "Mean log-ratio of rollout to teacher over the loss tokens that have a teacher: the reverse KL divergence."
    ),
    "policy/teacher_token_ratio": "Fraction of the loss tokens that have a teacher (`algorithm.teacher`).",
    "policy/by_staleness/<versions>/tokens": f"Number {_AT_STALENESS}",
    **{f"policy/by_staleness/<versions>/{name}": f"{text} {_AT_STALENESS}" for name, text in _RATIO.items()},
    "policy/by_staleness/<versions>/kl": f"Approximate divergence of trainer and sampling policy {_AT_STALENESS}",
    "policy/by_staleness/<versions>/clip_ratio": f"Clipped fraction {_AT_STALENESS}",
    "policy/by_staleness/<versions>/differing_fraction": (
        f"Fraction whose log-probability differs by more than `weights.verify_tolerance` {_AT_STALENESS}"
    ),
    "timing/eval": "Seconds of the evaluation that ended with this step.",
    "eval/step": "Step whose weights were evaluated; with `data.eval_mode: beside` an earlier one than the line's.",
    "eval/<set>/avg_score": "Mean return over the evaluation set.",
    "eval/<set>/pass_at_<k>": "Chance that one of `<k>` samples of a prompt has a positive return.",
    "eval/<set>/avg_turns": "Mean turns of an evaluated trajectory.",
    "eval/<set>/avg_tokens": "Mean sampled tokens of an evaluated trajectory.",
    "eval/<set>/truncated_ratio": "Fraction of the evaluated responses that were cut at the length limit.",
    "eval/<set>/lost_trajectories": "Evaluated trajectories that engine or environment lost; no mean counts them.",
    "environment/<environment>/<name>": (
        "Mean of what the environment returns as `info`, over the trajectories that ended since the step before; "
        f"at most {MAX_INFO_NAMES} names."
    ),
}

MEANINGS: dict[str, str] = {metric.key: metric.help for metric in reversed(TABLE) if metric.key} | STEP_KEYS
"""Every key with its meaning."""
