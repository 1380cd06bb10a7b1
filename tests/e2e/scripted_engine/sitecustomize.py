"""On the path of a run's processes: its generators have engines without a model, which answer with random words."""

import asyncio
import importlib.util
import random
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

ENGINE = "actors.engine.vllm_engine"
WORDS, SECONDS = 8, 0.3


def replace_engine(module: ModuleType) -> None:
    """Let the module have such an engine; no answer comes twice, so that a call that is sampled again would be seen."""
    import numpy as np

    from baton.examples.lookup import vocabulary
    from service.rollout.chat.chat import Chat
    from service.rollout.chat.tokenizer import load_tokenizer
    from service.rollout.engine import Generation

    class ScriptedEngine(module.VllmEngine):  # type: ignore[misc, name-defined]
        async def start(self, version: Any) -> None:
            self.serving, self.chat = version, Chat(load_tokenizer(self._model_folder))

        async def generate(self, prompt_ids: Any, sampling: Any, request_id: str) -> Generation:
            await asyncio.sleep(random.uniform(0.0, SECONDS))
            said = self.chat.plain(" ".join(random.choices(vocabulary(), k=WORDS))).tolist()
            ids = np.array([*said, self.chat.end_id], np.int32)
            versions = np.full(len(ids), self.serving.pack())
            return Generation(ids, np.full(len(ids), -0.5, np.float32), versions, "stop", sampled_end=True)

        async def update_weights(self, version: Any, data: Any, checksum: int) -> Any:
            self.serving = version
            return module.WeightUpdate(0, 0.0)

        async def check(self, deadline: float) -> None:
            """It is alive."""

    module.VllmEngine = ScriptedEngine  # type: ignore[attr-defined]


class Finder(MetaPathFinder):
    """Finds the module of the engine, once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            replace_engine(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
