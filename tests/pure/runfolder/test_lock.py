"""The lock of a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from service import files


def test_a_lock_whose_file_was_deleted_in_between_is_taken_again_on_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, taken = tmp_path / "folder", files._try_lock
    folder.mkdir()

    def deleted_first(lock: Any, how: int) -> bool:
        monkeypatch.setattr(files, "_try_lock", taken)
        shutil.rmtree(folder)
        folder.mkdir()
        return taken(lock, how)

    monkeypatch.setattr(files, "_try_lock", deleted_first)
    with files.lock_folder(folder, 10):
        assert files.is_locked(folder)
    assert not files.is_locked(folder)
