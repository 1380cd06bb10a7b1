"""A process group through which weights are broadcast: the trainer's first rank and all workers of some engines.

    driver        hosts the store where the members meet; writes `OVER` into it to end the group
    rank 0        the trainer's first rank, which sends
    rank 1, 2 ... the engines' workers, which receive

No member waits without a deadline, or for a member that has failed: each reads `OVER` while it waits, and a member
that fails writes it. Tensors on GPUs are sent by NCCL, on the group's own communicator and streams, so that they
take part in no other collective; tensors in CPU memory are sent by gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from service.errors import WeightsCutOff

BUCKET_BYTES = 128 << 20
"""Bytes of a bucket, which is broadcast at once; each member holds two buckets."""

OVER = "over"
"""Key of the store under which members write why the group has ended."""
HERE = "here"
"""Key of the store that counts the members that have joined."""

CHECK_SECONDS = 0.1
"""Seconds between two checks of `OVER`."""
ARRIVAL_SECONDS = 0.02
"""Seconds between two checks, over the network, of the number of members that have joined."""
PAUSE_SECONDS = 0.0005
"""Seconds between two checks of an operation in progress."""

LEAVE_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that torch reads when a group is created; 0: torch's watchdog does not end the process when a
member of the group dies."""


class Meeting(NamedTuple):
    """The settings that all members of a group share."""

    address: str
    port: int
    """Port of the driver's store."""
    size: int
    """Number of members, including the trainer's first rank."""
    within: float
    """Seconds within which all members must have joined, and within which each broadcast must end."""
    bucket_bytes: int = BUCKET_BYTES


def open_store(address: str) -> TCPStore:
    """Open the store of a new group in this process, which is not a member."""
    return TCPStore(address, 0, is_master=True, wait_for_workers=False)


class WeightGroup:
    """A group from the side of one member."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Join, and wait until all members have.

        Raises:
            WeightsCutOff: a member did not come in time, or the group is over.
        """
        self.meeting = meeting
        self._limit = timedelta(seconds=meeting.within)
        self._device = device
        self._backend: Any = None
        self._works: list[dist.Work] = []
        """Broadcasts that have begun and were not awaited yet."""
        self._control = self._store()
        with self.under_way():
            self._control.add(HERE, 1)
            self._wait(lambda: self._control.add(HERE, 0) >= meeting.size, ARRIVAL_SECONDS)
            # In a thread, because it waits for the other members without checking the deadline or `OVER`.
            self._backend = self._result_of(
                lambda: _make_backend(self._store(), rank, meeting.size, device, self._limit)
            )

    def _store(self) -> TCPStore:
        address, port = self.meeting.address, self.meeting.port
        try:
            return TCPStore(address, port, is_master=False, timeout=self._limit, wait_for_workers=False)
        except RuntimeError as error:
            raise WeightsCutOff(f"the driver's store at {address}:{port} does not answer: {error}") from error

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Run one operation of all members within the deadline; if this member fails, the group ends for all members.

        Raises:
            WeightsCutOff: the group has ended, or the deadline has passed.
        """
        self._until = time.monotonic() + self.meeting.within
        self._looked = 0.0
        try:
            yield
        except BaseException as error:  # whatever it is, the other members must not wait for this one
            self.end(str(error) or type(error).__name__)
            raise

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to copy rank 0's tensor into the tensor of every other member, after the current stream's work.

        Raises:
            WeightsCutOff: this member has left the group, or the group has ended.
        """
        if self._backend is None:
            raise WeightsCutOff("the group is over")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True  # on the communicator's own stream
        work: dist.Work = self._backend.broadcast([tensor], options)
        self._works.append(work)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a broadcast; on a GPU, kernels that this thread queues from now on see its data.

        Raises:
            WeightsCutOff: the broadcast failed, or the group has ended, or the deadline has passed.
        """
        self._wait(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_if_over()  # the member that ended the group has closed its connections, and has reported why
            raise WeightsCutOff(f"a broadcast failed: {error}") from error
        if not work.is_success():
            self._raise_if_over()
            raise WeightsCutOff("a broadcast failed")
        self._works.remove(work)

    def end(self, why: str) -> None:
        """Tell all members that the group is over, and abort this member's operations in progress."""
        with suppress(RuntimeError):  # the driver has died, or has ended the group itself
            self._control.compare_set(OVER, "", why)
        backend, self._backend = self._backend, None
        if backend is not None:  # in a thread, because aborting may wait for operations in progress
            Thread(target=_abort, args=(backend, self._works), daemon=True, name="abort-broadcast").start()

    def _wait(self, done: Callable[[], bool], pause: float = PAUSE_SECONDS) -> None:
        while not done():
            now = time.monotonic()
            if now > self._until:
                raise WeightsCutOff(f"the trainer and the engines were not done within {self.meeting.within:g} s")
            if now > self._looked + CHECK_SECONDS:
                self._looked = now
                self._raise_if_over()
            time.sleep(pause)

    def _raise_if_over(self) -> None:
        try:
            why = self._control.get(OVER).decode() if self._control.check([OVER]) else None
        except RuntimeError as error:
            raise WeightsCutOff(f"the driver's store is gone: {error}") from error
        if why is not None:
            raise WeightsCutOff(why)

    def _result_of(self, make: Callable[[], Any]) -> Any:
        """Call a function in a thread, which is abandoned at the deadline, and return its result."""
        made: Future[Any] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except Exception as error:  # noqa: BLE001 - raised by `result` below
                made.set_exception(error)

        Thread(target=run, daemon=True, name="join-broadcast").start()
        self._wait(made.done)
        try:
            return made.result()
        except RuntimeError as error:
            self._raise_if_over()
            raise WeightsCutOff(f"the trainer and the engines did not connect: {error}") from error


def _make_backend(store: Store, rank: int, size: int, device: torch.device, limit: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    before = os.environ.get(LEAVE_ERRORS)
    os.environ[LEAVE_ERRORS] = "0"
    try:
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        os.environ.pop(LEAVE_ERRORS) if before is None else os.environ.update({LEAVE_ERRORS: before})
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(device)
    return backend


def _abort(backend: Any, works: list[dist.Work]) -> None:
    """Abort a group, and keep a reference to it until its operations have ended. Otherwise its destructor would hold
    Python's lock while it waits for gloo's operations, which end by their own timeout."""
    backend.abort()
    while not all(work.is_completed() for work in works):
        time.sleep(CHECK_SECONDS)
