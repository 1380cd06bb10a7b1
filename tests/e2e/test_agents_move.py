"""Sessions of agents whose generator and gateway are killed in a real run."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import QUICK, Drive

pytestmark = pytest.mark.slow

TURNS = 4
PAUSE = 0.3


class Work:
    """Plays every session that it finds, as a service elsewhere does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failures, self.ended = folder, list[str](), dict[str, list[str]]()
        self._known: set[str] = set()
        self.is_over = False
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.is_over:
            for file in self.folder.glob("[!.]*.json"):
                if file.stem not in self._known:
                    self._known.add(file.stem)
                    threading.Thread(target=self._play, args=(file,), daemon=True).start()
            time.sleep(0.1)

    def _play(self, file: Path) -> None:
        job, said = json.loads(file.read_text()), list[str]()
        messages: list[Any] = [{"role": "user", "content": job["question"]}]
        try:
            with OpenAI(base_url=job["base_url"], api_key=job["key"], max_retries=10) as client:
                for _ in range(TURNS):
                    message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                    said.append(message.content or "")
                    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": job["question"]}]
                    time.sleep(PAUSE)
                end = {"reward": float(random.Random(file.stem).random() > 0.5), "transcript": json.dumps(said)}
                client.post(f"{job['base_url'].partition('/s/')[0]}/rl/sessions/x/finish", body=end, cast_to=object)
            self.ended[file.stem] = said
        except Exception as error:  # noqa: BLE001 - said by the test
            if not self.is_over:
                self.failures.append(f"{file.stem}: {error!r}")


def test_sessions_go_on_in_another_generator_when_theirs_and_the_gateway_are_killed(
    drive: Drive, tmp_path: Path
) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    work = Work(folder)
    run = drive(
        [
            *QUICK,
            "run.max_steps=3",
            "generator.engines=2",
            "generator.concurrent_groups=4",
            "generator.max_input_length=256",
            "algorithm.n_samples_per_prompt=4",
            "trainer.ranks=1",
            "trainer.mini_batch_size=2",
            "env.name=tests.e2e.elsewhere:Elsewhere",
            "env.trusted_modules=[tests.e2e.elsewhere]",
            f"env.options={{folder: {folder}}}",
            "agents.max_calls=8",
            "agents.end_grace=120",
            "buffer.merge=tree",
        ]
    )
    run.until_true(lambda: len(work.ended) >= 2, "a session that has ended")
    run.kill_part("ray::Generator")
    run.until_true(lambda: list(folder.glob("resumed/*")), "a session that has moved")
    run.kill_part("ray::GatewayActor")
    run.finish()
    assert not work.failures and "sessions_cut" not in run.summary()
    work.is_over = True
    assert all(name.endswith("-0") for name in work.ended), "an attempt was replaced"
