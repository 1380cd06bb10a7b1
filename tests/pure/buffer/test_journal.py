import errno
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import xxhash

from service.errors import JournalError, UserError
from service.handoff.journal.disk import Disk, File
from service.handoff.journal.journal import ALIGNMENT, SCHEMA, Journal
from tests.pure.buffer.world import TurnedClock, World
from tests.sim.disk import MemoryDisk, MemoryFile


def opened(folder: Path, disk: Disk | None = None, segment_bytes: int = 1 << 20) -> Journal:
    journal = Journal(folder, TurnedClock(), disk, segment_bytes)
    journal.frames = list(journal.replay())  # type: ignore[attr-defined]
    return journal


def payloads(folder: Path, disk: Disk | None = None) -> list[bytes]:
    return [frame.payload for frame in Journal(folder, TurnedClock(), disk).replay()]


def written(folder: Path, *batches: Sequence[bytes]) -> bytes:
    """Write payloads, one sync a batch; returns the segment's bytes."""
    journal = opened(folder)
    for batch in batches:
        for payload in batch:
            journal.append(2, payload)
        journal.sync()
    journal.close()
    return only_segment(folder).read_bytes()


def rotated(folder: Path, payloads: Sequence[bytes], segment_bytes: int = 500) -> Journal:
    """Write payloads, a sync each, and begin a new segment whenever one is full."""
    journal = opened(folder, segment_bytes=segment_bytes)
    for payload in payloads:
        journal.append(2, payload, begins_segment=journal.segment_is_full)
        journal.sync()
    return journal


def only_segment(folder: Path) -> Path:
    (segment,) = folder.glob("*.journal")
    return segment


def first_version_frame(payload: bytes) -> bytes:
    """The first frame of a journal as the first version of the format has it."""
    summed = struct.pack("<4sHHQQQd", b"BTNJ", 1, 1, 0, len(payload), 0, 1e9)
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(summed + payload))
    return (summed + checksum).ljust(64, b"\0") + payload.ljust(64, b"\0")


def test_a_journal_of_another_version_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    segment = journal / f"{0:020d}.journal"
    segment.write_bytes(first_version_frame(b"opened"))
    with pytest.raises(UserError) as caught:
        World(journal)
    said = str(caught.value)
    assert said.startswith(f"{segment}: ") and "\n" not in said
    assert "version 1" in said and f"version {SCHEMA}" in said and "begin a new run" in said
    assert segment.read_bytes() == first_version_frame(b"opened"), "nothing was changed"


def test_reserved_space_is_no_part_of_the_history(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert journal.reserve(100_000)
    journal.append(1, b"x")
    journal.sync()
    assert only_segment(tmp_path).stat().st_size >= 100_000
    assert payloads(tmp_path) == [b"x"]


def test_any_prefix_of_the_bytes_replays_to_a_prefix_of_the_history(tmp_path: Path) -> None:
    history = [b"first", b"second" * 20, b"", b"fourth"]
    data = written(tmp_path, history)
    segment = only_segment(tmp_path)
    for length in range(len(data) + 1):
        segment.write_bytes(data[:length])
        found = payloads(tmp_path)
        assert found == history[: len(found)]
        assert not any(segment.read_bytes()[sum(64 + -(-len(p) // 64) * 64 for p in found) :]), "the torn tail was cut"


def test_a_flipped_bit_before_the_last_sync_refuses_to_start_and_names_the_position(tmp_path: Path) -> None:
    data = written(tmp_path, [b"first", b"second" * 3], [b"third"])
    segment = only_segment(tmp_path)
    for byte in range(4 * 64):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << byte % 8
        segment.write_bytes(damaged)
        with pytest.raises(JournalError, match=rf"byte {byte // 128 * 128} "):
            payloads(tmp_path)
        assert segment.read_bytes() == damaged, "evidence is left as it is"


def test_a_flipped_bit_in_what_was_written_last_is_never_replayed(tmp_path: Path) -> None:
    data = written(tmp_path, [b"first"], [b"second"])
    segment = only_segment(tmp_path)
    for byte in range(128, len(data)):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << byte % 8
        segment.write_bytes(damaged)
        try:
            assert payloads(tmp_path) == [b"first"]
        except JournalError:
            assert byte - 128 in (4, 5), "a newer schema is not a torn tail"


def test_frames_of_one_sync_that_reached_the_disk_out_of_order_are_a_torn_tail(tmp_path: Path) -> None:
    data = bytearray(written(tmp_path, [b"durable"], [b"lost", b"kept"]))
    data[128:256] = bytes(128)
    only_segment(tmp_path).write_bytes(data)
    assert payloads(tmp_path) == [b"durable"]


HISTORY = [bytes([i]) * 200 for i in range(30)]


def test_a_missing_segment_refuses_to_start(tmp_path: Path) -> None:
    rotated(tmp_path, HISTORY).close()
    sorted(tmp_path.glob("*.journal"))[1].unlink()
    with pytest.raises(JournalError, match="a file is missing"):
        payloads(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.parent / "gone")])
def test_a_segment_that_is_no_file_is_refused_by_its_name(tmp_path: Path, make: Callable[[Path], None]) -> None:
    written(tmp_path, [b"a"])
    make(path := tmp_path / f"{ALIGNMENT:020d}.journal")
    with pytest.raises(JournalError, match=rf"{path.name}: cannot open this segment: [^\n]+$"):
        opened(tmp_path)
    assert not (tmp_path / "gone").exists()


def test_damage_at_the_beginning_of_the_oldest_segment_left_refuses_to_start_and_changes_nothing(
    tmp_path: Path,
) -> None:
    journal = rotated(tmp_path, HISTORY)
    journal.reclaim(journal.position, once=journal.position)
    journal.sync()
    journal.close()
    segment = only_segment(tmp_path)
    assert int(segment.stem) > 0
    damaged = bytearray(segment.read_bytes())
    damaged[20] ^= 8
    segment.write_bytes(damaged)
    with pytest.raises(JournalError, match=r"damaged at byte 0 .*refusing to start"):
        payloads(tmp_path)
    assert segment.read_bytes() == damaged


@pytest.mark.parametrize("what", ["flip", "zeros", "cut"])
def test_damage_at_the_end_of_a_segment_that_is_not_the_last_refuses_to_start_and_changes_nothing(
    tmp_path: Path, what: str
) -> None:
    rotated(tmp_path, HISTORY).close()
    segment = sorted(tmp_path.glob("*.journal"))[-2]
    damaged = bytearray(segment.read_bytes())
    last = len(damaged) - 320
    if what == "flip":
        damaged[last + 100] ^= 1
    else:
        damaged[last:] = bytes(320) if what == "zeros" else b""
    segment.write_bytes(damaged)
    with pytest.raises(JournalError, match="refusing to start"):
        payloads(tmp_path)
    assert segment.read_bytes() == damaged, "evidence is left as it is"


class SharedDisk(MemoryDisk):
    """A full disk beside another process, which takes what is given back first."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self.taken = taken

    def open(self, path: Path) -> File:
        return self.files.setdefault(path, SharedFile(self))


class SharedFile(MemoryFile):
    def truncate(self, size: int) -> None:
        super().truncate(size)
        disk = self._disk
        assert isinstance(disk, SharedDisk)
        disk.room, disk.taken = disk.room - disk.taken, 0


def test_of_reserved_space_only_what_another_process_takes_is_missing(tmp_path: Path) -> None:
    disk = SharedDisk(taken=50_000)
    journal = Journal(tmp_path, TurnedClock(), disk, segment_bytes=500)
    assert list(journal.replay()) == []
    assert journal.reserve(3 << 20)
    for payload in HISTORY:
        disk.room = disk.used()
        journal.append(2, payload, begins_segment=journal.segment_is_full)
        journal.sync()
    assert journal.synced == journal.position and len(disk.files) > 10
    disk.room = disk.used()
    left = (3 << 20) - journal.position - 50_000
    assert not journal.reserve(left + 1)
    assert journal.reserve(left - 4096 * len(disk.files))


def test_reserved_space_survives_a_restart(tmp_path: Path) -> None:
    disk = MemoryDisk()
    journal = Journal(tmp_path, TurnedClock(), disk)
    assert list(journal.replay()) == [] and journal.reserve(1 << 20)
    journal.append(2, b"x")
    journal.sync()
    disk.room = disk.used()
    again = Journal(tmp_path, TurnedClock(), disk)
    assert len(list(again.replay())) == 1
    assert again.reserve(1 << 19), "admitted groups find their place although the disk is full"


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    class Broken(MemoryDisk):
        def open(self, path: Path) -> File:
            file = super().open(path)
            file.sync = Mock(side_effect=OSError(errno.EIO, "Input/output error"))  # type: ignore[method-assign]
            return file

    journal = opened(tmp_path, Broken())
    journal.append(2, b"x")
    with pytest.raises(JournalError, match=r"\.journal: cannot sync"):
        journal.sync()


def test_frames_can_be_read_again_from_a_position(tmp_path: Path) -> None:
    rotated(tmp_path, HISTORY).close()
    journal = opened(tmp_path)
    starts = [frame.position for frame in journal.read(0)]
    assert [frame.payload for frame in journal.read(starts[4])] == HISTORY[4:]
    assert [frame.payload for frame in journal.read(starts[4], starts[7])] == HISTORY[4:7]
