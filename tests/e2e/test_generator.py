"""A generator with its real engine and the real buffer; the test plays the trainer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from safetensors.torch import save
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

import actors.generator.claimer
from actors.buffer.actor import BufferActor, LeasedBatch
from actors.deaths import WATCHING
from actors.driver.prepare import prepare
from actors.engine.vllm_engine import engine_env
from actors.generator.actor import Generator
from actors.observe.metrics_hub import MetricsHub
from service.config import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    DataConfig,
    GeneratorConfig,
    MakeModelConfig,
    MetricsConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from service.errors import RunFailed
from service.evaluation.scores import EvalShard
from service.handoff.steps.wire import decode_mini_batch
from service.types import MiniBatch, PolicyVersion
from tests.pure.actors.fakes import at, bucket_of
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.full]

CONFIG = Config(
    run=RunConfig(stall_deadline=60),
    model=ModelConfig(dtype="float32", make=MakeModelConfig()),
    data=DataConfig(make_rows=64),
    generator=GeneratorConfig(concurrent_groups=8, max_input_length=128, max_generate_length=8, temperature=0.9),
    buffer=BufferConfig(lookahead=1),
    metrics=MetricsConfig(port=0),
    algorithm=AlgorithmConfig(n_samples_per_prompt=4),
    trainer=TrainerConfig(mini_batch_size=4, ranks=1),
)
SECONDS = 240.0
UNTOUCHED = ("revision", "issued", "frontier", "next_slot", "groups", "tokens", "accepted_tokens", "policy_version")
"""What an evaluation leaves as it is: the prompts' cursor, the slots that staleness is counted by, the ledger."""


class Patient(Generator):
    """Its polls end only with work or with a newer version, so that nothing is found by merely asking again."""

    def __init__(self, *arguments: Any) -> None:
        actors.generator.claimer.POLL_SECONDS = 10 * SECONDS
        super().__init__(*arguments)


@dataclass
class Road:
    """The running parts, and every policy that was published."""

    buffer: Any
    generator: Any
    work: Any
    trainer_incarnation: int
    policies: list[PreTrainedModel]
    tasks_file: str

    def lease(self) -> LeasedBatch:
        answer = ray.get(self.buffer.lease.remote(self.trainer_incarnation, SECONDS))
        assert isinstance(answer, LeasedBatch)
        return answer

    def publish(self, policy: PreTrainedModel) -> dict[str, float]:
        """The engine serves `policy` as the version after the last one."""
        self.policies.append(policy)
        version = PolicyVersion(self.trainer_incarnation, len(self.policies) - 1)
        weights = {name: tensor for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}
        data = save(weights)
        octets, number = np.frombuffer(data, np.uint8), version.step
        path = ray.get(self.generator.hold_image.remote(number, version.pack(), len(data)))
        ray.get(self.generator.write_image.remote(number, bucket_of(octets), octets))
        update: dict[str, float] = ray.get(self.generator.update_weights.remote(version.pack(), at(path, len(data)), 0))
        ray.get(self.generator.release_image.remote(number))
        return update

    def commit(self, leased: LeasedBatch) -> None:
        version = PolicyVersion(self.trainer_incarnation, len(self.policies))
        assert ray.get(self.buffer.commit.remote(self.trainer_incarnation, leased.lease, version)) is None

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = ray.get(self.generator.status.remote())
        return status


def changed(policy: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Another policy, as after a large step."""
    torch.manual_seed(seed)
    copy = type(policy)(policy.config).float().eval()
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs + 0.02 * torch.randn_like(theirs))
    return copy


@pytest.fixture(scope="module")
def road(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    folder: Path = tmp_path_factory.mktemp("road")
    prepared = prepare(CONFIG, folder)
    config_json = CONFIG.model_dump_json()
    hub = ray.remote(MetricsHub).options(num_cpus=0).remote(config_json)
    buffer = (
        ray.remote(BufferActor)
        .options(num_cpus=0, max_concurrency=100)
        .remote(config_json, prepared.vocab_size, str(prepared.tasks_file), str(folder / "journal"), hub)
    )
    generator = (
        ray.remote(concurrency_groups={WATCHING: 1})(Patient)
        .options(num_cpus=1, max_concurrency=100, runtime_env={"env_vars": engine_env(CONFIG.generator)})
        .remote("generator-0", config_json, str(prepared.model_folder), str(prepared.tasks_file), buffer, hub)
    )
    ray.get(generator.start.remote())
    road = Road(
        buffer, generator, None, ray.get(buffer.join.remote("trainer", "trainer")), [], str(prepared.tasks_file)
    )
    road.publish(AutoModelForCausalLM.from_pretrained(prepared.model_folder, dtype=torch.float32).eval())
    road.work = generator.run.remote()
    yield road
    for actor in (buffer, generator, hub):
        ray.kill(actor)


def difference(road: Road, batch: MiniBatch, step: int) -> float:
    """Largest difference between the recorded log-probabilities and those of the policy that the versions name."""
    largest = 0.0
    for micro in (micro for rank in batch.ranks for micro in rank):
        rows = np.split(micro.token_ids_N.astype(np.int64), micro.offsets_R[1:-1])
        # Causal attention never looks at padding on the right.
        token_ids_RT = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
        is_token_RT = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
        for age in np.unique(micro.staleness_N[micro.loss_mask_N]):
            with torch.no_grad():
                logits = road.policies[step - int(age)](token_ids_RT).logits / CONFIG.generator.temperature
            logprobs_RT = logits.log_softmax(-1)[:, :-1].gather(2, token_ids_RT[:, 1:, None])[..., 0]
            expected_N = pad(logprobs_RT, (1, 0))[is_token_RT].numpy()
            at = micro.loss_mask_N & (micro.staleness_N == age)
            largest = max(largest, float(np.abs(expected_N - micro.logprobs_N)[at].max()))
    return largest


def ages_of(batch: MiniBatch) -> set[int]:
    """The staleness of the tokens that carry loss."""
    return {int(age) for rank in batch.ranks for micro in rank for age in micro.staleness_N[micro.loss_mask_N]}


def wait_until_idle(road: Road) -> dict[str, Any]:
    """The generator has nothing to play and nothing to send, and waits for the trainer."""

    def idle() -> dict[str, Any] | None:
        status = road.status()
        waits = (status["waiting"] or "").startswith("lookahead") and status["trajectories"] == 0
        return status if waits and status["outbox"]["ends"] == status["counts"]["trajectories"] else None

    return until(idle, SECONDS, road.status)  # type: ignore[return-value]


def test_a_generator_works_as_far_ahead_as_it_may_and_says_what_it_waits_for(road: Road) -> None:
    status = wait_until_idle(road)
    assert status["counts"]["groups"] == 2 * CONFIG.trainer.mini_batch_size
    assert status["policy_version"] == str(PolicyVersion(road.trainer_incarnation, 0))


def test_what_is_leased_was_sampled_by_the_policies_that_its_versions_name(road: Road) -> None:
    seen: set[int] = set()
    ages: set[int] = set()
    for step in range(5):
        leased = road.lease()
        batch = decode_mini_batch(leased.parts[0])
        assert not seen & set(batch.groups)
        seen |= set(batch.groups)
        assert difference(road, batch, step) < 1e-4
        ages |= ages_of(batch)
        road.commit(leased)
        road.publish(changed(road.policies[-1], step))
    assert ages >= {0, 1} and max(ages) <= 3
    status = wait_until_idle(road)
    assert status["refusals"] == {} and status["counts"]["updates"] == 6
    assert status["outbox"]["ends"] == status["counts"]["trajectories"] == 4 * status["counts"]["groups"]


def test_a_waiting_claim_is_renewed_as_soon_as_a_newer_version_is_served(road: Road) -> None:
    before = wait_until_idle(road)["counts"]["groups"]
    leased = road.lease()
    road.commit(leased)
    road.publish(changed(road.policies[-1], 77))
    until(
        lambda: road.status()["counts"]["groups"] > before, SECONDS, lambda: "the older version's claim is waited for"
    )


def test_evaluation_plays_every_sample_and_the_buffer_sees_none_of_it(road: Road) -> None:
    wait_until_idle(road)
    before = ray.get(road.buffer.status.remote())
    groups = road.status()["counts"]["groups"]
    played = ray.get(road.generator.evaluate.remote("dev", road.tasks_file, 4, EvalShard(1, 2, most=5)))
    assert len(played) == 2 * 4 and len({trajectory.prompt_uid for trajectory in played}) == 2
    assert all(0 <= trajectory.reward <= 1 and trajectory.n_turns > 0 for trajectory in played)
    after = ray.get(road.buffer.status.remote())
    assert {name: after[name] for name in UNTOUCHED} == {name: before[name] for name in UNTOUCHED}
    assert road.status()["counts"]["groups"] == groups


def test_a_dead_engine_fails_the_run_and_ends_the_actor(road: Road) -> None:
    actor = psutil.Process(road.status()["pid"])
    (core,) = [child for child in actor.children() if "EngineCore" in " ".join(child.cmdline())]
    core.kill()
    with pytest.raises(RunFailed, match="the engine core died"):
        ray.get(road.work, timeout=SECONDS)
    with pytest.raises(ray.exceptions.RayActorError):
        until(lambda: road.status() is None, SECONDS)
