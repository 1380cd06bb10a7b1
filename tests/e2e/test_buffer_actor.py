"""A buffer that cannot start says why at once, instead of being started again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.clock import SystemClock
from service.config import load_config
from service.errors import JournalError
from service.handoff.journal.journal import Journal

pytestmark = pytest.mark.slow


def test_a_damaged_journal_is_said_to_whoever_asks(local_ray: None, tmp_path: Path) -> None:
    import ray

    from actors.buffer.actor import BufferActor

    config = load_config(["configs/quickstart.yaml"], ["data.make_rows=64"])
    prepared = prepare(config, tmp_path)
    folder = tmp_path / "journal"
    journal = Journal(folder, SystemClock())
    assert list(journal.replay()) == []
    for number in range(4):
        journal.append(number % 2 + 1, bytes(100))
        journal.sync()
    journal.close()
    (segment,) = folder.glob("*.journal")
    damaged = bytearray(segment.read_bytes())
    damaged[40] ^= 1
    segment.write_bytes(damaged)

    given = (config.model_dump_json(), prepared.vocab_size, str(prepared.tasks_file), str(folder), "no-hub")
    buffer = ray.remote(BufferActor).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote(*given)
    for method in (buffer.ready, buffer.status):
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(method.remote(), timeout=240)
        assert isinstance(caught.value.cause, JournalError) and "refusing to start" in str(caught.value.cause)
    ray.kill(buffer)
