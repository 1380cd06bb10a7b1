"""Weights broadcast to all engines at once: what arrives, what it costs the sender, and who waits for whom how long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from actors.weights.nccl_broadcast import N_BUCKETS, BroadcastSender, cut, receive, send
from actors.weights.policy_tensors import TensorSpec
from actors.weights.weight_group import BUCKET_BYTES, LEAVE_ERRORS, OVER, Meeting, WeightGroup, open_store
from service.errors import WeightsCutOff

CPU = torch.device("cpu")
LONG, SHORT = 60.0, 1.0
SLACK = 20.0
"""Seconds that a loaded machine may add to a deadline."""
WEIGHTS = {
    "embedding": torch.arange(501, dtype=torch.float32).view(3, 167),
    "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "head": torch.arange(77, dtype=torch.int8).view(7, 11),
}


def specs_of(weights: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, str(w.dtype).removeprefix("torch."), tuple(w.shape)) for name, w in weights.items()]


SPECS = specs_of(WEIGHTS)


class Members:
    """The members of one group, each in a thread of its own; `store` is the driver's."""

    def __init__(self, size: int, bucket_bytes: int = BUCKET_BYTES, within: float = LONG) -> None:
        self.store = open_store("127.0.0.1")
        self.meeting = Meeting("127.0.0.1", self.store.port, size, within, bucket_bytes)
        self.threads = ThreadPoolExecutor(size)
        joining = [self.threads.submit(WeightGroup, self.meeting, rank, CPU) for rank in range(size)]
        self.groups = [future.result(LONG) for future in joining]

    def within(self, seconds: float) -> None:
        """The deadline of all broadcasts from now on."""
        for group in self.groups:
            group.meeting = group.meeting._replace(within=seconds)

    def sends(self, weights: Mapping[str, Tensor] = WEIGHTS) -> Future[None]:
        return self.threads.submit(broadcast_from, self.groups[0], weights)

    def receives(self, rank: int, specs: list[TensorSpec] = SPECS) -> Future[dict[str, Tensor]]:
        return self.threads.submit(received_by, self.groups[rank], specs)


def broadcast_from(group: WeightGroup, weights: Mapping[str, Tensor]) -> None:
    with group.under_way():
        send(group, weights, CPU)


def received_by(group: WeightGroup, specs: list[TensorSpec]) -> dict[str, Tensor]:
    with group.under_way():
        return dict(receive(group, specs, CPU))


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(*arguments: Any, **more: Any) -> Members:
        made.append(Members(*arguments, **more))
        return made[-1]

    yield make
    for each in made:
        for group in each.groups:
            group.end("the test is over")
        each.threads.shutdown()


@pytest.mark.parametrize("bucket_bytes", [1, 7, 100, 2004, 2008, 1 << 20])
def test_the_pieces_of_all_buckets_are_all_tensors_byte_by_byte(bucket_bytes: int) -> None:
    sizes = [spec.n_bytes for spec in SPECS]
    buckets = list(cut(sizes, bucket_bytes))
    assert all(sum(piece.n_bytes for piece in bucket) == bucket_bytes for bucket in buckets[:-1])
    found = [(piece.tensor, piece.start + n) for bucket in buckets for piece in bucket for n in range(piece.n_bytes)]
    assert found == [(tensor, n) for tensor, size in enumerate(sizes) for n in range(size)]
    for bucket in buckets:
        assert [piece.at for piece in bucket] == [sum(p.n_bytes for p in bucket[:n]) for n in range(len(bucket))]


@pytest.mark.parametrize("bucket_bytes", [97, 2004, BUCKET_BYTES])
def test_every_engine_receives_every_tensor_however_the_buckets_cut_them(
    members: Callable[..., Members], bucket_bytes: int
) -> None:
    group = members(3, bucket_bytes)
    for shift in (0, 1):  # the group stays for the next update
        weights = {name: tensor + shift for name, tensor in WEIGHTS.items()}
        sending, receiving = group.sends(weights), [group.receives(rank) for rank in (1, 2)]
        sending.result(LONG)
        for received in receiving:
            found = received.result(LONG)
            assert list(found) == list(weights)
            assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
            assert [tensor.dtype for tensor in found.values()] == [tensor.dtype for tensor in weights.values()]


def test_a_bucket_holds_parts_of_tensors_so_two_of_them_are_all_that_a_sender_allocates(
    members: Callable[..., Members],
) -> None:
    bucket_bytes = 1 << 20
    weights = {f"layers.{n}": torch.full((3 << 20,), n, dtype=torch.int8) for n in range(8)}
    group = members(2, bucket_bytes)
    receiving = group.receives(1, specs_of(weights))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        broadcast_from(group.groups[0], weights)
    assert receiving.result(LONG).keys() == weights.keys()
    live = peak = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak == N_BUCKETS * bucket_bytes


def raised(future: Future[Any]) -> str:
    """Why a member was cut off."""
    with pytest.raises(WeightsCutOff) as cut_off:
        future.result(LONG)
    return str(cut_off.value)


class Aborted:
    """A member's backend, which says when it is aborted."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.aborted = Event()

    def broadcast(self, *arguments: Any) -> Any:
        return self.backend.broadcast(*arguments)

    def abort(self) -> None:
        self.aborted.set()
        self.backend.abort()


def watched(group: WeightGroup) -> Aborted:
    group._backend = Aborted(group._backend)
    return group._backend


def test_an_engine_that_hangs_holds_nobody_longer_than_the_deadline(members: Callable[..., Members]) -> None:
    group = members(3, 97)
    backends = [watched(each) for each in group.groups[:2]]
    group.within(SHORT)
    begun = time.monotonic()
    why = {raised(each) for each in (group.sends(), group.receives(1))}
    assert time.monotonic() - begun < SHORT + SLACK
    assert f"the trainer and the engines were not done within {SHORT:g} s" in why
    assert all(backend.aborted.wait(SLACK) for backend in backends)


def test_a_member_that_fails_midway_ends_the_group_for_all_at_once_with_its_reason(
    members: Callable[..., Members],
) -> None:
    group = members(3, 97)
    small_first = {name: WEIGHTS[name] for name in ("norm", "embedding")}  # whole in the first of many buckets
    specs = specs_of(small_first)

    def fail_midway() -> None:
        with group.groups[2].under_way():
            for name, _ in receive(group.groups[2], specs, CPU):
                raise ValueError(f"no such parameter: {name}")

    begun = time.monotonic()
    failing = group.threads.submit(fail_midway)
    sending, receiving = group.sends(small_first), group.receives(1, specs)
    assert {raised(sending), raised(receiving)} == {"no such parameter: norm"}
    assert time.monotonic() - begun < SLACK < LONG
    with pytest.raises(ValueError, match="no such parameter"):
        failing.result(LONG)


def test_the_driver_ends_a_group_while_its_members_wait_in_it(members: Callable[..., Members]) -> None:
    group = members(3, 97)
    backends = [watched(each) for each in group.groups[:2]]
    sending, receiving = group.sends(), group.receives(1)
    group.store.set(OVER, "generator-1: its process died")
    begun = time.monotonic()
    assert {raised(sending), raised(receiving)} == {"generator-1: its process died"}
    assert time.monotonic() - begun < SLACK < LONG
    assert all(backend.aborted.wait(SLACK) for backend in backends)


def test_a_sender_that_was_late_is_cut_off_at_its_next_broadcast_and_frees_the_others(
    members: Callable[..., Members],
) -> None:
    group = members(2, 97)
    group.groups[0].end("the sender was late")
    assert raised(group.sends()) == "the group is over"
    assert raised(group.receives(1)) == "the sender was late"


def test_members_do_not_wait_for_one_that_never_comes() -> None:
    store = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", store.port, 3, SHORT)
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(WeightGroup, meeting, rank, CPU) for rank in range(2)]
        assert f"the trainer and the engines were not done within {SHORT:g} s" in {raised(each) for each in joining}
    assert time.monotonic() - begun < SHORT + SLACK


def test_a_driver_that_is_gone_frees_the_members(members: Callable[..., Members]) -> None:
    group = members(2, 97)
    sending = group.sends()
    del group.store
    assert "the driver's store is gone" in raised(sending)


class FakeNccl:
    """torch's NCCL process group, as far as it is called."""

    made: list[FakeNccl]
    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.place, self.timeout = (rank, size), options._timeout
        self.errors_left = os.environ.get(LEAVE_ERRORS)
        self.did: list[Any] = []
        self.made.append(self)

    def _set_sequence_number_for_group(self) -> None:
        self.did.append("number")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.did.append(("connect", device))

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Any:
        self.did.append(("broadcast", tensors, options.rootRank, options.asyncOp))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: True, is_success=lambda: True)

    def abort(self) -> None:
        self.did.append("abort")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[FakeNccl]:
    FakeNccl.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return FakeNccl.made


def test_on_gpus_the_group_has_a_communicator_of_its_own_whose_failure_ends_no_process(nccl: list[FakeNccl]) -> None:
    store, device = open_store("127.0.0.1"), torch.device("cuda", 0)
    group = WeightGroup(Meeting("127.0.0.1", store.port, 1, LONG), 0, device)
    (backend,) = nccl
    assert (backend.place, backend.timeout) == ((0, 1), timedelta(seconds=LONG))
    assert backend.errors_left == "0"
    assert LEAVE_ERRORS not in os.environ, "the ranks' own process groups keep torch's default"
    assert backend.did == ["number", ("connect", device)]
    backend.did.clear()
    bucket = torch.zeros(3)
    group.wait(group.broadcast(bucket))
    assert backend.did == [("broadcast", [bucket], 0, True)]
    group.end("the run is over")
    deadline = time.monotonic() + SLACK
    while "abort" not in backend.did and time.monotonic() < deadline:
        time.sleep(0.001)
    assert backend.did[-1] == "abort"


def test_a_trainer_sends_on_a_stream_of_its_own_made_once(
    nccl: list[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, on, sent = list[torch.device](), list[Any](), Event()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            streams.append(device)

    class Under:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            on.append(self.stream)

        def __exit__(self, *error: object) -> None:
            on.append(None)

    def recorded(group: WeightGroup, weights: Mapping[str, Tensor], device: torch.device) -> None:
        on.append((group.meeting, list(weights)))
        sent.set()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Under)
    monkeypatch.setattr("actors.weights.nccl_broadcast.send", recorded)
    device = torch.device("cuda", 0)
    sender = BroadcastSender(device)
    stores = [open_store("127.0.0.1") for _ in range(2)]
    meetings = [Meeting("127.0.0.1", store.port, 1, LONG) for store in stores]
    for number in (0, 0, 1):
        sent.clear()
        sender.begin(meetings[number], WEIGHTS)
        assert sent.wait(SLACK)
    assert streams == [device]
    assert [said for said in on if isinstance(said, tuple)] == [(meetings[n], list(WEIGHTS)) for n in (0, 0, 1)]
    assert on[0] is on[3] and isinstance(on[0], Stream)
    assert len(nccl) == 2, "one group for two broadcasts to the same engines"
