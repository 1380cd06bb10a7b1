"""Two buffers never write one journal."""

from pathlib import Path

import pytest

from actors.buffer.actor import lock_journal
from service.errors import RunFailed


def test_a_journal_belongs_to_one_process_until_that_ends(tmp_path: Path) -> None:
    first = lock_journal(tmp_path / "journal", 0.0)
    with pytest.raises(RunFailed, match="another process still writes this journal"):
        lock_journal(tmp_path / "journal", 0.1)
    first.close()
    lock_journal(tmp_path / "journal", 0.0).close()
