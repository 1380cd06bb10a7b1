"""Makes syncs or weights slow on demand. Python imports this module at its start if its folder is on PYTHONPATH.

The environment variable `BATON_SLOW` names a folder. While the folder has a file `journal`, every fdatasync takes
longer by the seconds in that file. While it has a file `weights`, so does the loading of new weights into an engine.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("BATON_SLOW")
LOADER = "actors.engine.vllm_engine"


def _seconds(what: str) -> float:
    file = Path(FOLDER or "", what)
    return float(file.read_text()) if file.exists() else 0.0


def _slow_syncs() -> None:
    usual = os.fdatasync

    def fdatasync(fd: Any) -> None:
        usual(fd)
        time.sleep(_seconds("journal"))

    os.fdatasync = fdatasync


class _SlowWeights(importlib.abc.MetaPathFinder):
    """Wraps `_load_weights` of the module that loads them, once it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != LOADER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no {LOADER}")
        usual = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            usual(module)
            load = module._load_weights

            async def _load_weights(*arguments: Any) -> None:
                await asyncio.sleep(_seconds("weights"))
                await load(*arguments)

            module._load_weights = _load_weights  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if FOLDER:
    _slow_syncs()
    sys.meta_path.insert(0, _SlowWeights())
