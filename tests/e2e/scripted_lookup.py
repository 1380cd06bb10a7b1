"""The quick start's task, with answers that a run repeats: what the engine samples depends on the policy and on the
place in the run (group, sample, turn), not on when it is asked, nor on how often."""

import copy
import sys
import zlib
from contextvars import ContextVar
from typing import Any

from baton.examples import lookup
from baton.examples.lookup import Lookup, demonstrations, vocabulary

__all__ = ["Lookup", "demonstrations", "rows", "vocabulary"]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Those of the task, played in this module's environment."""
    return [row | {"env_class": f"{__name__}:{Lookup.__name__}"} for row in lookup.rows(n, seed)]


REQUEST = ContextVar[str]("request")

engine: Any = sys.modules.get("actors.engine.vllm_engine")
if engine is not None:  # the process of a generator, which imports this module for its first environment
    generate, sampling_params = engine.VllmEngine.generate, engine._sampling_params

    async def scripted(self: Any, prompt_ids: Any, sampling: Any, request_id: str) -> Any:
        """With a seed of the place in the run, the attempt left out."""
        parts = [part for part in request_id.split("/") if not part.startswith("attempt=")]
        REQUEST.set("/".join(parts))
        return await generate(self, prompt_ids, sampling, request_id)

    def with_seed(sampling: Any) -> Any:
        """vLLM's parameters for one request."""
        params = copy.copy(sampling_params(sampling))
        params.seed = zlib.crc32(REQUEST.get("").encode())
        return params

    engine.VllmEngine.generate, engine._sampling_params = scripted, with_seed
