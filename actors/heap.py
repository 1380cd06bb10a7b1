"""Makes Python's garbage collection cheap in long-lived processes."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Exclude all present objects from later garbage collections; call this once a process has started.

    Modules, tokenizers and models are some hundred thousand objects that live as long as the process. A collection
    that visits all of them takes a tenth of a second, and the loops that play trajectories create enough objects
    to cause many collections.
    """
    gc.collect()
    gc.freeze()
