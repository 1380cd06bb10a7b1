"""Combinations that would deadlock or be wrong are refused at start, with the consequence."""

import re
from pathlib import Path

import pytest

from service.config import Config, check, check_paths, load, load_config
from service.config.learn import AlgorithmConfig
from service.errors import ConfigError, UserError
from service.handoff.batches.estimators import ESTIMATORS, GROUP_ESTIMATORS, TURN_ESTIMATORS

QUICKSTART = Path("configs/quickstart.yaml")
AGENT = ["env.name=agent", "env.command=[codex]"]
SHORT = {"AGENT": AGENT, "TEACHER": ["algorithm.teacher={}", "scorers.t={kind: teacher, model: /m}"]}


REFUSED = r"""
algorithm.estimator  algorithm.estimator=gae
run.max_steps  run.max_steps=1e23
run.stop_grace  run.stop_grace=1e12
run.dir  run.dir=~nobody-of-this-name/runs
generator.engines  weights.transport=ipc & generator.engines={min: 1, max: 2}
generator.engines  generator.engines={min: 3, max: 2}
generator.engines  weights.transport=ipc & generator.engines=3
generator.kv_cache_bytes  weights.transport=ipc & generator.kv_cache_bytes=null
generator.tensor_parallel_size  weights.transport=ipc & generator.tensor_parallel_size=2
buffer.max_group_bytes  buffer.max_group_bytes=1
model.warm_start.demonstrations  model.warm_start.demonstrations=63
model.make.head_dim  model.make.head_dim=33
model.dtype  model.lora={} & weights.transport=ipc
model.lora.rank  model.lora.rank=513
model.lora.targets  model.lora.targets=[q_proj,k_prj]
model.lora.targets  model.lora.targets=[all-linear]
model.lora.targets  model.lora.targets=[experts]
model.lora.targets  model.lora.targets=[]
model.adapter  model.adapter=a
model.adapter  model.adapter=a & model.lora={}
algorithm.estimator  algorithm.estimator=grop
algorithm.loss  algorithm.loss=ppo_clop
algorithm.loss  algorithm.loss=ppo
algorithm.estimator  algorithm.estimator='a b:mine'
algorithm.loss  algorithm.loss='my_losses:'
algorithm.correction.truncate  algorithm.correction.truncate=token
algorithm.correction.token_band  algorithm.correction.token_band=[2.0,0.5]
generator.quantization  generator.quantization=fp8
generator.quantization  generator.quantization=fp8 & algorithm.correction.truncate_at=1.5
weights.verify  weights.verify=true & generator.quantization=fp8 & algorithm.correction.token_band=[0.5,2.0]
scorers.judge  scorers.judge.weight=2
scorers.judge.use  scorers.judge.use=judge
scorers.judge  scorers.judge.url=http://h
scorers.judge  scorers.judge.model=/m
scorers.t.tokenizer  algorithm.teacher={} & scorers.t={kind: teacher, url: 'http://t'}
scorers.t.kind  scorers.t={kind: teacher, model: /m}
algorithm.teacher  algorithm.teacher={}
algorithm.teacher.column  algorithm.teacher={} & scorers={a: {kind: teacher, model: /m}, b: {kind: teacher, model: /m}}
generator.temperature  TEACHER & generator.temperature=0.9
generator.top_p  TEACHER & generator.top_k=20
generator.temperature  generator.temperature=2.1
data.eval_temperature  data.eval_temperature=2.1
generator.top_k  generator.top_k=600
generator.top_k  generator.top_k=1
algorithm.filter_zero_variance  TEACHER & algorithm.filter_zero_variance=true
algorithm.teacher.mode  TEACHER & algorithm.loss=cross_entropy
data.eval_every  data.eval_make_rows=8 & data.eval_every=5 & weights.sync_every=2
data.eval_make_rows  data.eval.made=x.jsonl & data.eval_make_rows=8
buffer.max_staleness  buffer.lookahead=4 & buffer.max_staleness=3
buffer.lookahead  buffer.lookahead=1 & weights.sync_every=3
generator.concurrent_groups  generator.concurrent_groups=15
generator.concurrent_groups  generator.engines=40
trainer.max_tokens_per_micro_batch  trainer.max_tokens_per_micro_batch=135
trainer.max_tokens_per_micro_batch  trainer.sequence_parallel=2 & trainer.max_tokens_per_micro_batch=67
trainer.sequence_parallel  trainer.ranks=3 & trainer.sequence_parallel=2
trainer.layout  trainer.sequence_parallel=2 & trainer.layout=padded
trainer.sequence_parallel  trainer.ranks=6 & trainer.sequence_parallel=3
algorithm.n_samples_per_prompt  algorithm.n_samples_per_prompt=1
buffer.max_bytes  buffer.max_bytes=1000
buffer.max_journal_bytes  trainer.checkpoint_every=10 & buffer.max_journal_bytes=1000
model.path  model.path=x
model.path  model.make=null
data.train  data.train=x
data.train  data.make_rows=null
trainer.ranks  trainer.ranks=129
roles.aux  roles={aux: {}}
roles.main  roles={main: {mode: judge}}
run.keep_best  run.keep_best=eval/made/avg_score
run.keep_best  run.keep_best=eval/other/avg_score & data.eval_every=4 & data.eval_make_rows=8
roles.v  roles={v: {mode: frozen}}
roles.v  roles={v: {mode: judge, model: m}}
roles.v  roles={v: {mode: frozen, model: m, key_file: k}}
roles.v.url  roles={v: {mode: frozen, url: h, model: m}}
env.command  env.name=agent
env.command  env.command=[codex]
env.variables.OPENAI_API_KEY  AGENT & env.variables={OPENAI_API_KEY: x}
env.score  AGENT & env.score=pytest
env.score  AGENT & env.score=my_pkg:score
env.limits.seconds  AGENT & agents.deadline=2000
env.score  AGENT & env.score=[]
env.limits.memory_bytes  env.limits.memory_bytes=9223372036854775808
agents.host  agents.host=''
agents.exit_code_reward  agents.exit_code_reward={'1.5': 0.0}
"""
"""The setting that is named, and the overrides of the quick start, between &; some have short names."""


@pytest.mark.parametrize("room", ["max_group_bytes", "max_bytes", "max_journal_bytes"])
def test_a_buffer_without_room_for_wide_supports_names_what_makes_them_small(room: str) -> None:
    with pytest.raises(ConfigError, match=rf"buffer.{room}: [^\n]*; set generator.top_k"):
        check(load_config([QUICKSTART], ["generator.top_p=0.9", f"buffer.{room}=100000"]))


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_a_combination_is_refused_by_the_setting_to_change(case: str) -> None:
    path, _, words = case.partition("  ")
    overrides = [word for each in words.split(" & ") for word in SHORT.get(each, [each])]
    with pytest.raises(ConfigError, match=rf"^(override .*)?{re.escape(path)}[:=.]") as caught:
        check(load_config([QUICKSTART], overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.lookahead=0"],
        ["algorithm.anchor=proximal", "algorithm.correction.truncate=sequence"],
        ["algorithm.loss=absent_module.deep:mine"],
        ["buffer.lookahead=2", "weights.sync_every=3", "buffer.max_staleness=2"],
        *([f"algorithm.estimator={name}"] for name in ("rloo", "maxrl")),
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
    with pytest.raises(ConfigError, match=r"(?s)^model\.path: .*\ndata\.train: "):
        check(Config())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["model.path=nowhere"], ["model.path"]),
        (["model.path=."], ["model.path"]),
        (["data.train=rows.jsonl"], ["data.train"]),
        ([r'model.path="nul\0byte"'], ["model.path"]),
        ([f"run.dir={'long' * 100}"], ["run.dir"]),
        (["metrics.wandb={}"], ["metrics.wandb"]),
        (["algorithm.loss=absent_module.deep:mine"], ["algorithm.loss"]),
        (["algorithm.estimator=absent_module.deep:mine"], ["algorithm.estimator"]),
        (
            ["env.workdir=nowhere", "env.command=[no-such-agent]", "env.score=[no-such-test]"],
            ["env.workdir", "env.command", "env.score"],
        ),
        (["env.workdir=.", "env.command=[sh]", "env.score=[/no/such/test]"], ["env.score"]),
        (["env.workdir=.", "env.command=[sh]", "env.score=[./test.sh]"], []),
    ],
)
def test_what_is_missing_is_named(
    settings: list[str], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("service.config.paths.find_spec", lambda name: None)
    config = load_config([], settings)
    if named:
        with pytest.raises(UserError) as caught:
            check_paths(config)
        assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == named
    else:
        check_paths(config)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("model.path=Qwen/Qwen3-0.6B", " (did you mean hf:Qwen/Qwen3-0.6B?)"),
        ("data.train=openai/gsm8k", " (did you mean hf:openai/gsm8k:FILE.parquet?)"),
        ("data.train=rows/train.jsonl", ""),
        ("model.path=models/Qwen3-0.6B", ""),
        ("env.workdir=some/folder", ""),
    ],
)
def test_the_name_of_a_hub_without_its_prefix_is_answered_with_the_address(
    setting: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(f"{setting.partition('=')[2]} does not exist{hint}; give a ")):
        check_paths(load_config([], [setting]))


def test_the_estimators_that_may_stand_in_a_configuration_are_those_that_are_registered() -> None:
    own = {name for name, function in ESTIMATORS.items() if function.__module__ == "service.handoff.batches.estimators"}
    assert {*GROUP_ESTIMATORS} == own
    told = AlgorithmConfig.model_fields["estimator"].description or ""
    assert [name for name in own if name not in told] == [] and {*TURN_ESTIMATORS} <= own
