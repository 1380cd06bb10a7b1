"""A folder that replaces another is whole at any moment at which its writer may die; the lock of a folder."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service import files
from service.files import atomic_folder, previous_folder, recover_folder

DIES = """
import os, sys
from pathlib import Path
from service.files import atomic_folder
rename = os.replace
def renamed(source, target):
    rename(source, target)
    os.kill(os.getpid(), 9)
os.replace = renamed
with atomic_folder(Path(sys.argv[1])) as partial:
    (partial / "weights").write_text("new")
    if sys.argv[2] == "while writing":
        os.kill(os.getpid(), 9)
"""


def write(folder: Path, text: str) -> None:
    with atomic_folder(folder) as partial:
        (partial / "weights").write_text(text)


def texts(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("moment", ["while writing", "between the renames"])
def test_a_writer_that_is_killed_leaves_the_earlier_folder_for_the_next_one(tmp_path: Path, moment: str) -> None:
    final = tmp_path / "final"
    write(final, "old")
    assert subprocess.run([sys.executable, "-c", DIES, final, moment], timeout=240).returncode == -9
    left = final if final.exists() else previous_folder(final)
    assert (left / "weights").read_text() == "old"
    recover_folder(final)
    assert texts(tmp_path) == {"final/weights": "old"} and len([*tmp_path.iterdir()]) == 1

    subprocess.run([sys.executable, "-c", DIES, final, moment], timeout=240)
    write(final, "new")
    assert texts(tmp_path) == {"final/weights": "new"} and len([*tmp_path.iterdir()]) == 1


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    final = tmp_path / "final"
    write(final, "old")
    with pytest.raises(OSError, match="no space left"), atomic_folder(final) as partial:
        (partial / "weights").write_text("half")
        raise OSError("no space left")
    assert texts(tmp_path) == {"final/weights": "old"} and len([*tmp_path.iterdir()]) == 1


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
