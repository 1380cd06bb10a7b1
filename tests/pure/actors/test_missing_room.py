"""What a cluster lacks for the ranks and engines of a run, node by node."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from actors.driver import placement
from actors.driver.cluster import _refuse_unfit_nodes
from actors.driver.placement import (
    Bundle,
    Node,
    can_fit,
    fits,
    missing_room,
    refuse_too_few_gpus,
    reserve,
    run_bundles,
)
from service.config import Config, check, load_config
from service.errors import UserError
from tests.waiting import ran


def config(**parts: dict[str, object]) -> Config:
    return Config.model_validate(parts)


FOUR_AND_TWO = config(trainer={"ranks": 4}, generator={"engines": 2, "tensor_parallel_size": 2})


def node(name: str, resources: dict[str, float], labels: dict[str, str] | None = None) -> Node:
    return {"NodeManagerAddress": name, "Resources": resources, "Labels": labels or {}}


def test_a_run_has_a_bundle_for_each_rank_and_each_engine() -> None:
    ranks, engines = [Bundle({"CPU": 1.0, "GPU": 1.0})] * 4, [Bundle({"CPU": 1.0, "GPU": 2.0})] * 2
    assert run_bundles(FOUR_AND_TWO, 1) == ranks + engines
    assert run_bundles(FOUR_AND_TWO, 0) == [Bundle({"CPU": 0.5})] * 6
    shared = config(trainer={"ranks": 2}, generator={"engines": 2}, weights={"transport": "ipc"})
    assert run_bundles(shared, 1) == [Bundle({"CPU": 2.0, "GPU": 1.0})] * 2


def test_what_a_run_needs_and_what_each_node_has_is_said_in_words() -> None:
    spot = {"ray.io/market-type": "spot"}
    with_gpus = node("10.0.0.1", {"CPU": 16.0, "GPU": 3.0, "memory": 1e11, "node:10.0.0.1": 1.0})
    cluster = [with_gpus, node("b", {"memory": 1.0}), node("c", {"CPU": 16.0}, spot | {"zone": "x"})]
    said = missing_room([*run_bundles(FOUR_AND_TWO, 1), Bundle({"CPU": 0.5}, {"ray.io/market-type": "!spot"})], cluster)
    assert "4 x (1 GPU, 1 CPU); 2 x (2 GPU, 1 CPU); 1 x (0.5 CPU, ray.io/market-type: !spot), each on one node" in said
    assert "10.0.0.1 has 3 GPU, 16 CPU; b has none of it; c has 16 CPU, ray.io/market-type: spot)" in said


@pytest.mark.parametrize(
    ("parts", "lacks"),
    [
        ({"placement": {"trainer": {"zone": "nowhere"}}}, "zone: nowhere"),
        ({"placement": {"generators": {"zone": "nowhere"}}}, "zone: nowhere"),
        ({"trainer": {"accelerator": "H100"}}, "0.001 accelerator_type:H100"),
        ({"generator": {"engines": 99}}, "101 x (0.5 CPU)"),
    ],
)
def test_what_the_only_machine_never_has_is_refused_at_once(
    parts: dict[str, dict[str, object]], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [node("a", {"CPU": 16.0}, {"ray.io/node-id": "0"})]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "nodes", lambda: here)
    with pytest.raises(UserError, match=r"a has 16 CPU\), and no other node joins .*set RAY_ADDRESS$") as refused:
        asyncio.run(reserve(run_bundles(config(**parts), 0), 600, print))
    assert lacks in str(refused.value)
    assert can_fit(run_bundles(config(placement={"trainer": {"ray.io/market-type": "!spot"}}), 0), here)


@pytest.mark.parametrize(
    ("choice", "fitting"),
    [("red", "a"), ("!red", "bc"), ("in(red, blue)", "ab"), ("!in(red,blue)", "c"), ("green", "")],
)
def test_a_choice_of_labels_means_what_it_means_to_ray(choice: str, fitting: str) -> None:
    nodes = [node("a", {}, {"color": "red"}), node("b", {}, {"color": "blue"}), node("c", {})]
    labels = Config.model_validate({"placement": {"buffer": {"color": choice}}}).placement.buffer
    assert "".join(each["NodeManagerAddress"] for each in nodes if fits(each, labels)) == fitting
    assert " " not in labels["color"], "to Ray a space is part of the value that follows"


@pytest.mark.parametrize("labels", [{"color": "re d"}, {"color": "!!red"}, {"color": "in()"}, {"co lor": "red"}])
def test_what_ray_would_not_take_as_a_label_is_refused_with_the_configuration(labels: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"placement\.trainer.* must be (a value|the name of a label), "):
        load_config(["configs/quickstart.yaml"], [f"placement.trainer={json.dumps(labels)}"])


@pytest.mark.parametrize(
    ("name", "gpus", "overrides"),
    [
        ("gsm8k", 8, None),
        ("one_gpu", 1, None),
        ("gsm8k", 7, ["trainer.ranks=4", "generator.engines=3"]),
        ("gsm8k", 3, ["trainer.ranks=2", "generator.engines=1"]),
        ("gsm8k", 2, ["trainer.ranks=1", "generator.engines=1"]),
        ("gsm8k", 1, ["trainer.ranks=1", "generator.engines=1", "weights.transport=ipc"]),
        ("search_r1", 8, None),
        ("search_r1", 2, ["trainer.ranks=1", "generator.engines=1"]),
    ],
)
def test_too_few_gpus_are_refused_with_settings_that_fit_and_pass_every_check(
    name: str, gpus: int, overrides: list[str] | None
) -> None:
    file = f"configs/{name}.yaml"
    recipe = load_config([file])
    if overrides is None:
        return refuse_too_few_gpus(recipe, gpus)
    with pytest.raises(UserError, match=rf"^8 GPUs are needed .*, this machine has {gpus}; ") as refused:
        refuse_too_few_gpus(recipe, gpus)
    proposed = str(refused.value).partition("used with: ")[2].split()
    assert set(overrides) <= set(proposed)
    fitting = load_config([file], proposed)
    check(fitting)
    refuse_too_few_gpus(fitting, gpus)
    wide = load_config([file], ["generator.tensor_parallel_size=4"])
    with pytest.raises(UserError, match=r"generator\.tensor_parallel_size=1 weights\.transport=ipc"):
        refuse_too_few_gpus(wide, min(gpus, 2))


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        (["trainer.ranks=16", "trainer.sequence_parallel=2", "generator.tensor_parallel_size=2"], 5),
        (["generator.engine_options.pipeline_parallel_size=2"], 1),
        (["trainer.ranks=12", "weights.transport=ipc", "generator.kv_cache_bytes=1000000000"], 11),
        (["trainer.sequence_parallel=2"], 1),
    ],
)
def test_the_settings_that_fit_divide_as_those_that_do_not(settings: list[str], gpus: int) -> None:
    file = "configs/gsm8k.yaml"
    given = [*settings, "generator.engines=1"]
    check(load_config([file], given))
    with pytest.raises(UserError) as refused:
        refuse_too_few_gpus(load_config([file], given), gpus)
    _, _, proposed = str(refused.value).partition("used with: ")
    assert bool(proposed) == (gpus > 1 or len(settings) != 1 or "sequence" not in settings[0])
    if proposed:
        fitting = load_config([file], [*given, *proposed.split()])
        check(fitting)
        refuse_too_few_gpus(fitting, gpus)


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_quick_start_fits_one_gpu_and_two(gpus: int, tmp_path: Path) -> None:
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\nfor n in " + " ".join(map(str, range(gpus))) + "; do echo GPU $n: H100; done\n")
    listing.chmod(0o755)
    made = ran("make", "-n", "quickstart", PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = next(line for line in made.stdout.splitlines() if "baton run" in line).split()
    settings = command[command.index("configs/quickstart.yaml") + 1 :]
    config = load_config(["configs/quickstart.yaml"], settings)
    check(config)
    refuse_too_few_gpus(config, gpus)


def test_a_teachers_engine_never_uses_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray hides no GPU from an actor that asks for none."""
    monkeypatch.setenv("RAY_ADDRESS", "pretended")
    teacher = config(scorers={"teacher": {"kind": "teacher", "model": tmp_path}})
    with pytest.raises(UserError, match=r"^scorers\.teacher\.gpus: "):
        _refuse_unfit_nodes(teacher, has_gpu=True)
    _refuse_unfit_nodes(teacher, has_gpu=False)
    _refuse_unfit_nodes(config(scorers={"teacher": {"kind": "teacher", "model": tmp_path, "gpus": 1}}), has_gpu=True)
