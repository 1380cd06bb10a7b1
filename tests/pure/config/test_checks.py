"""Combinations that would deadlock or be wrong are refused at start, with the consequence."""

from pathlib import Path

import pytest

from service.config import Config, check, check_paths, load, load_config
from service.config.checks_algorithm import TEMPORAL_ESTIMATORS
from service.errors import ConfigError, UserError
from service.handoff.batches.score import ESTIMATORS, GROUP_ESTIMATORS

QUICKSTART = Path("configs/quickstart.yaml")
AGENT = ["env.name=agent", "env.command=[codex]"]
TOKENS = "trainer.max_tokens_per_micro_batch"


@pytest.mark.parametrize(
    ("overrides", "path", "consequence"),
    [
        (["algorithm.estimator=gae"], "algorithm.estimator", "step-wise rows are separate sequences"),
        (["algorithm.estimator=reinforce++"], "algorithm.estimator", "step-wise rows are separate sequences"),
        (
            ["algorithm.estimator=gae", "algorithm.step_wise=false", "buffer.merge=off"],
            "algorithm.estimator",
            "does not train",
        ),
        (["weights.transport=ipc", "generator.engines={min: 1, max: 2}"], "generator.engines", "join or leave"),
        (
            [
                "data.eval_every=4",
                "data.eval_make_rows=8",
                "data.eval_mode=beside",
                "generator.engines={min: 1, max: 3}",
            ],
            "data.eval_mode",
            "none may be left to go on with training",
        ),
        (["generator.engines={min: 3, max: 2}"], "generator.engines", "more than max"),
        (["weights.transport=ipc", "generator.engines=3"], "generator.engines", "some would never be placed"),
        (
            ["weights.delta=true", "weights.transport=nccl"],
            "weights.delta",
            "in the copies of weights.transport=memory",
        ),
        (["weights.delta=true", "model.lora={}"], "weights.delta", "only the adapter travels"),
        (
            ["weights.transport=ipc", "generator.kv_cache_bytes=null"],
            "generator.kv_cache_bytes",
            "while the rank beside it loads",
        ),
        (
            ["weights.transport=ipc", "generator.tensor_parallel_size=2"],
            "generator.tensor_parallel_size",
            "other GPUs would keep old ones",
        ),
        (["buffer.max_group_bytes=1"], "buffer.max_group_bytes", "the policy would learn to be short"),
        (["model.warm_start.expected_success=[0.5,0.1]"], "model.warm_start.expected_success", "holds no success"),
        (["model.warm_start.demonstrations=63"], "model.warm_start.demonstrations", "not even one batch"),
        (["model.make.head_dim=33"], "model.make.head_dim", "is odd"),
        (["model.lora={}", "weights.transport=nccl"], "model.dtype", "16 bits, not in float32; use bfloat16"),
        (["model.lora.rank=513"], "model.lora.rank", "the largest slot has rank 512"),
        (["model.lora.targets=[q_proj,k_prj]"], "model.lora.targets", "did you mean k_proj?"),
        (["model.lora.targets=[all-linear]"], "model.lora.targets", "leave targets out"),
        (["model.lora.targets=[experts]"], "model.lora.targets", "choose of q_proj"),
        (["model.lora.targets=[lm_head]"], "model.lora.targets", "untie"),
        (["model.lora.targets=[]"], "model.lora.targets", "nothing would be trained"),
        (["model.adapter=a"], "model.adapter", "nothing would train it"),
        (["model.adapter=a", "model.lora={}"], "model.adapter", "no longer fit them"),
        (["algorithm.estimator=grop"], "algorithm.estimator", "did you mean grpo?"),
        (["algorithm.estimator=GRPO"], "algorithm.estimator", "did you mean grpo?"),
        (["algorithm.loss=ppo_clop"], "algorithm.loss", "did you mean ppo_clip?"),
        (["algorithm.loss=ppo"], "algorithm.loss", "did you mean ppo_clip?"),
        (["algorithm.estimator='a b:mine'"], "algorithm.estimator", "no module:name"),
        (["algorithm.loss='my_losses:'"], "algorithm.loss", "no module:name"),
        (["algorithm.correction.truncate=token"], "algorithm.correction.truncate", "count twice"),
        (
            ["algorithm.correction.token_band=[2.0,0.5]"],
            "algorithm.correction.token_band",
            "every token would be masked",
        ),
        (["generator.quantization=fp8"], "generator.quantization", "nothing corrects for it"),
        (
            ["generator.quantization=fp8", "algorithm.correction.truncate_at=1.5"],
            "generator.quantization",
            "token_band",
        ),
        (["scorers.judge.weight=2"], "scorers.judge", "it is open who scores"),
        (["scorers.judge.use=judge"], "scorers.judge.use", "no module:name"),
        (["scorers.judge.model=/m"], "scorers.judge.model", "no rewards"),
        (
            ["algorithm.teacher={}", "scorers.t={kind: teacher, url: 'http://t'}"],
            "scorers.t.tokenizer",
            "the same token ids",
        ),
        (["scorers.t={kind: teacher, model: /m}"], "scorers.t.kind", "nothing is learned from it"),
        (["algorithm.teacher={}"], "algorithm.teacher", "no teacher to learn from"),
        (
            ["algorithm.teacher={}", "scorers={a: {kind: teacher, model: /m}, b: {kind: teacher, model: /m}}"],
            "algorithm.teacher.column",
            "which of a, b teaches",
        ),
        (
            ["algorithm.teacher={}", "scorers.t={kind: teacher, model: /m}", "generator.temperature=0.9"],
            "generator.temperature",
            "at temperature 1",
        ),
        (
            ["algorithm.teacher={}", "scorers.t={kind: teacher, model: /m}", "algorithm.filter_zero_variance=true"],
            "algorithm.filter_zero_variance",
            "a teacher would teach",
        ),
        (
            ["algorithm.teacher={}", "scorers.t={kind: teacher, model: /m}", "algorithm.loss=cross_entropy"],
            "algorithm.teacher.mode",
            "no effect",
        ),
        (["algorithm.step_wise=false"], "buffer.merge", "no steps to merge"),
        (
            ["data.eval_make_rows=8", "data.eval_every=5", "weights.sync_every=2"],
            "data.eval_every",
            "evaluated on older weights",
        ),
        (["data.eval.made=x.jsonl", "data.eval_make_rows=8"], "data.eval_make_rows", "never be played"),
        (
            ["algorithm.step_wise=false", "buffer.merge=off", "generator.conversation=rerender"],
            "generator.conversation",
            "no single sequence",
        ),
        (["buffer.lookahead=4", "buffer.max_staleness=3"], "buffer.max_staleness", "masked"),
        (["buffer.lookahead=1", "weights.sync_every=3"], "buffer.lookahead", "deadlock"),
        (["generator.concurrent_groups=15"], "generator.concurrent_groups", "at least 16"),
        (["generator.engines=40"], "generator.concurrent_groups", "40 engines"),
        (["trainer.max_tokens_per_micro_batch=135"], "trainer.max_tokens_per_micro_batch", "at least 136"),
        (["trainer.sequence_parallel=2", "trainer.max_tokens_per_micro_batch=67"], TOKENS, "use at least 68"),
        (["trainer.ranks=3", "trainer.sequence_parallel=2"], "trainer.sequence_parallel", "do not divide into groups"),
        (["trainer.sequence_parallel=2", "trainer.layout=padded"], "trainer.layout", "cannot cut"),
        (["trainer.ranks=6", "trainer.sequence_parallel=3"], "trainer.sequence_parallel", "cannot divide the model's"),
        (["algorithm.reduction=sequence_mean"], "algorithm.reduction", "counts rows"),
        (["algorithm.n_samples_per_prompt=1"], "algorithm.n_samples_per_prompt", "zero"),
        (["buffer.max_bytes=1000"], "buffer.max_bytes", "deadlock"),
        (["trainer.checkpoint_every=10", "buffer.max_journal_bytes=1000"], "buffer.max_journal_bytes", "fill"),
        (["generator.top_p=0.9"], "generator.top_p", "importance ratio"),
        (["generator.top_k=50"], "generator.top_k", "importance ratio"),
        (["generator.min_p=0.1"], "generator.min_p", "importance ratio"),
        (["generator.repetition_penalty=1.1"], "generator.repetition_penalty", "importance ratio"),
        (["generator.presence_penalty=0.5"], "generator.presence_penalty", "importance ratio"),
        (["generator.frequency_penalty=0.5"], "generator.frequency_penalty", "importance ratio"),
        (["model.path=x"], "model.path", "model.make is set too"),
        (["model.make=null"], "model.path", "no model"),
        (["data.train=x"], "data.train", "keep one of them: add data.train=null or data.make_rows=null"),
        (["data.make_rows=null"], "data.train", "no prompts"),
        (["model.make.num_kv_heads=3"], "model.make.num_kv_heads", "divide"),
        (["trainer.ranks=129"], "trainer.ranks", "never have a row"),
        (["roles={aux: {}}"], "roles.aux", "kind of an agent's calls"),
        (["roles={main: {mode: judge}}"], "roles.main", "is there in every run and always trained"),
        (["data.eval_mode=beside", "generator.engines=2"], "data.eval_mode", "data.eval_every is 0, so there are none"),
        (["roles={v: {mode: frozen}}"], "roles.v", "nothing says who plays it"),
        (["roles={v: {mode: judge, model: m}}"], "roles.v", "would never be asked"),
        (["roles={v: {gpus: 1}}"], "roles.v", "would never be asked"),
        (["roles={v: {mode: frozen, model: m, key_file: k}}"], "roles.v.key_file", "is for url"),
        (["roles={v: {mode: frozen, url: 'http://h/v1', model: m, gpus: 1}}"], "roles.v.gpus", "url names another"),
        (["roles={v: {mode: frozen, url: h, model: m}}"], "roles.v.url", "no address"),
        (["roles={v: {}}", "algorithm.step_wise=false", "buffer.merge=off"], "algorithm.step_wise", "of its own"),
        (["env.name=agent"], "env.command", "has nothing to run"),
        (["env.command=[codex]"], "env.command", "would never run, because env.name is 'lookup'"),
        ([*AGENT, "env.command=[codex,'{promt}']"], "env.command", "did you mean {prompt}?"),
        ([*AGENT, "env.variables={HOME: '{foldr}'}"], "env.variables", "did you mean {folder}?"),
        ([*AGENT, "env.variables={OPENAI_API_KEY: x}"], "env.variables.OPENAI_API_KEY", "not yours to set"),
        ([*AGENT, "env.score=pytest"], "env.score", "a command is a list, such as [pytest]"),
        ([*AGENT, "env.score=my_pkg:score"], "env.score", "env.trusted_modules does not name 'my_pkg'"),
        ([*AGENT, "agents.deadline=2000"], "env.limits.seconds", "lost before it is scored"),
        ([*AGENT, "env.score=[]"], "env.score", "is an empty command"),
        ([*AGENT, 'env.command=["a\\0b"]'], "env.command", "zero byte"),
        ([*AGENT, 'env.score=[a, "\\0"]'], "env.score", "zero byte"),
        ([*AGENT, 'env.variables={A: "\\0"}'], "env.variables", "zero byte"),
        ([*AGENT, 'env.variables={"A=B": x}'], "env.variables", "no name of an environment variable"),
        ([*AGENT, 'env.variables={"": x}'], "env.variables", "no name of an environment variable"),
    ],
)
def test_a_combination_is_refused_with_its_path_and_consequence(
    overrides: list[str], path: str, consequence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load_config([QUICKSTART], overrides))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and consequence in message and "\n" not in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"env.limits.memory_bytes={1 << 63}", " or less, not "),
        ("agents.host=''", "at least 1 character"),
        ("agents.host='a b'", "must match"),
    ],
)
def test_a_value_that_no_operating_system_takes_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^override {override.partition('=')[0]}=.*{reason}"):
        load_config([QUICKSTART], [override])


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.lookahead=0"],
        ["buffer.lookahead=2", "weights.sync_every=3", "buffer.max_staleness=2"],
        ["generator.top_k=0"],
        ["algorithm.reduction=sequence_mean", "buffer.merge=off"],
        ["algorithm.step_wise=false", "buffer.merge=off"],
        ["generator.concurrent_groups=16"],
        ["weights.transport=ipc", "generator.engines=2"],
        ["trainer.max_tokens_per_micro_batch=136"],
        ["trainer.sequence_parallel=2", "trainer.max_tokens_per_micro_batch=68"],
        ["trainer.ranks=256", "trainer.sequence_parallel=2"],
        [*AGENT, "env.command=[a, '-c', 'x={name=1}', '{prompt} {prompt_file} {folder} {base_url} {seed}']"],
        [*AGENT, "agents.deadline=2100"],
        [*AGENT, "env.trusted_modules=[my_pkg]", "env.score=my_pkg.scores:score"],
    ],
)
def test_the_edge_of_each_bound_is_allowed(overrides: list[str]) -> None:
    check(load_config([QUICKSTART], overrides))


def test_a_refusal_names_the_file_and_line_that_set_the_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("buffer:\n  max_staleness: 0\n")
    loaded = load([QUICKSTART, file])
    with pytest.raises(ConfigError, match=r"mine\.yaml:2  buffer\.max_staleness: 0 is below"):
        check(loaded.config, loaded.source)


def test_a_bare_configuration_says_that_model_and_data_are_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config())
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["model.path", "data.train"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model folder .*nowhere does not exist"):
        check_paths(load_config([], [f"model.path={tmp_path / 'nowhere'}"]))
    with pytest.raises(UserError, match=r"has no config\.json"):
        check_paths(load_config([], [f"model.path={tmp_path}"]))
    with pytest.raises(UserError, match=r"dataset .*rows\.jsonl does not exist"):
        check_paths(load_config([], [f"data.train={tmp_path / 'rows.jsonl'}"]))


def test_a_missing_template_or_program_of_an_agent_is_named(tmp_path: Path) -> None:
    overrides = [f"env.workdir={tmp_path / 'nowhere'}", "env.command=[no-such-agent]", "env.score=[no-such-test]"]
    with pytest.raises(UserError) as caught:
        check_paths(load_config([], overrides))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "env.workdir",
        "env.command",
        "env.score",
    ]
    check_paths(load_config([], [f"env.workdir={tmp_path}", "env.command=[sh]", "env.score=[./test.sh]"]))


@pytest.mark.parametrize("name", [r"nul\0byte", "long" * 100])
@pytest.mark.parametrize("setting", ["run.dir", "data.train", "model.path"])
def test_a_path_that_no_system_can_open_is_named(name: str, setting: str) -> None:
    with pytest.raises(UserError, match=rf"{setting}: .* cannot be opened: "):
        check_paths(load_config([QUICKSTART], [f'{setting}="{name}"', "model.make=null"]))


def test_the_estimators_that_may_stand_in_a_configuration_are_those_that_are_registered() -> None:
    own = {name for name, function in ESTIMATORS.items() if function.__module__ == "service.handoff.batches.score"}
    assert {*GROUP_ESTIMATORS, *TEMPORAL_ESTIMATORS} == {*own, "gae"}


@pytest.mark.parametrize("name", ["estimator", "loss"])
def test_a_function_of_ones_own_is_named_by_its_module_which_must_be_there(name: str) -> None:
    config = load_config([QUICKSTART], [f"algorithm.{name}=absent_module.deep:mine"])
    check(config)
    with pytest.raises(UserError, match=rf"algorithm\.{name}: there is no module 'absent_module'"):
        check_paths(config)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_outcome_estimators_pass_with_step_wise_rows(estimator: str) -> None:
    check(load_config([QUICKSTART], [f"algorithm.estimator={estimator}"]))


def test_reinforce_plus_plus_passes_where_a_trajectory_is_one_sequence() -> None:
    overrides = ["algorithm.estimator=reinforce++", "algorithm.step_wise=false", "buffer.merge=off"]
    check(load_config([QUICKSTART], overrides))


def test_truncation_passes_with_a_proximal_anchor() -> None:
    check(load_config([QUICKSTART], ["algorithm.anchor=proximal", "algorithm.correction.truncate=sequence"]))


def test_a_tracker_that_is_not_installed_is_named_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.config.paths.find_spec", lambda name: None)
    check_paths(load_config([QUICKSTART]))
    with pytest.raises(UserError, match=r"metrics\.wandb: the package wandb is not installed"):
        check_paths(load_config([QUICKSTART], ["metrics.wandb={}"]))
