"""Python's search for garbage in processes that live long."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Leave what is there now out of every further search for garbage; to be called once a process has started.

    Modules, tokenizers and models are some hundred thousand objects that live as long as the process. A search through
    all of them takes a tenth of a second, and the loops that play trajectories make enough objects for many searches.
    """
    gc.collect()
    gc.freeze()
