"""What a cluster lacks for the ranks and engines of a run, node by node."""

from actors.driver.placement import Node, missing_room, run_bundles
from service.config import Config


def config(**parts: dict[str, object]) -> Config:
    return Config.model_validate(parts)


FOUR_AND_TWO = config(trainer={"ranks": 4}, generator={"engines": 2, "tensor_parallel_size": 2})


def node(name: str, gpus: int) -> Node:
    return Node(name, {"CPU": 16.0, "GPU": float(gpus), "memory": 1e11, f"node:{name}": 1.0})


def test_a_run_has_a_bundle_for_each_rank_and_each_engine() -> None:
    assert run_bundles(FOUR_AND_TWO, 1) == [{"CPU": 1.0, "GPU": 1.0}] * 4 + [{"CPU": 1.0, "GPU": 2.0}] * 2
    assert run_bundles(FOUR_AND_TWO, 0) == [{"CPU": 0.5}] * 6
    shared = config(trainer={"ranks": 2}, generator={"engines": 2}, weights={"transport": "ipc"})
    assert run_bundles(shared, 1) == [{"CPU": 2.0, "GPU": 1.0}] * 2


def test_gpus_enough_in_all_do_not_help_an_engine_whose_gpus_lie_on_two_nodes() -> None:
    odd = [node("10.0.0.1", 3), node("10.0.0.2", 3), node("10.0.0.3", 3)]
    spread = config(trainer={"ranks": 1}, generator={"engines": 4, "tensor_parallel_size": 2})
    said = missing_room(run_bundles(spread, 1), odd)
    assert "no node has room for 1 x (2 GPU, 1 CPU), each on one node" in said
    assert "10.0.0.1 has 3 GPU, 16 CPU; 10.0.0.2 has 3 GPU, 16 CPU" in said and "memory" not in said


def test_large_bundles_are_placed_first() -> None:
    assert "other work of the cluster" in missing_room(run_bundles(FOUR_AND_TWO, 1), [node("a", 4), node("b", 4)])


def test_each_kind_of_bundle_that_finds_no_place_is_counted() -> None:
    said = missing_room(run_bundles(FOUR_AND_TWO, 1), [node("a", 3)])
    assert "1 x (2 GPU, 1 CPU); 3 x (1 GPU, 1 CPU)" in said
    assert "a has none of it" in missing_room([{"GPU": 1.0}], [Node("a", {"memory": 1.0})])
