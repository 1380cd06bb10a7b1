"""A Ray that does not start, or only at another try."""

import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import pytest

from actors.driver import ray_session
from actors.driver.placement import run_bundles
from actors.driver.ray_session import RAYLET_ERRORS, START_TRIES
from actors.engine.vllm_arguments import SCRATCH
from actors.watchdog import MARK
from service.config import Config
from service.errors import RunFailed, UserError
from tests.pure.forked import Forked

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."
CHECK = "Check failed: statussetor3576.has_value() Timed out waiting for file metrics_agent_port_9176"
RAYLET = f"[2026-11-22 09:42:32,679 C 1 1] (raylet) node_manager.cc:3576:  An unexpected system state. {CHECK}\nstack\n"


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], list[str]]:
    """Let Ray fail at so many starts; returns the list to which what was done is added."""
    done: list[str] = []

    def failing(times: int, failure: Exception) -> list[str]:
        def init(_temp_dir: str, **settings: object) -> None:
            done.append("start")
            private = Path(_temp_dir).parent  # Ray opens its own folder to every user
            assert private.parent == tmp_path and stat.S_IMODE(private.stat().st_mode) == 0o700
            logs = Path(_temp_dir) / "session_latest" / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            (logs / RAYLET_ERRORS).write_text(RAYLET)
            if done.count("start") <= times:
                raise failure

        monkeypatch.setattr(ray_session.ray, "init", init)
        return done

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(MARK, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_session, "start_watchdog", lambda *words: None)
    monkeypatch.setattr(ray_session, "end_processes", lambda mark, known: done.append(f"end {mark}"))
    return failing


@pytest.mark.parametrize("failure", [Exception(SLOW), ConnectionError("refused")])
def test_a_ray_that_never_starts_is_tried_again_and_ends_the_run_with_why_its_raylet_ended(
    failure: Exception, starts: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = starts(START_TRIES, failure)
    with pytest.raises(RunFailed) as refused, ray_session.ray_session(Config(), "mark", tmp_path):
        raise AssertionError("there is no Ray")
    assert str(failure) in str(refused.value) and CHECK in str(refused.value)
    assert done == [*["start", "end mark"] * (START_TRIES - 1), "start"]
    assert (tmp_path / RAYLET_ERRORS).read_text() == RAYLET


def test_a_ray_that_starts_at_the_second_try_is_used_and_a_bug_in_its_start_stays_one(
    starts: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = starts(1, Exception(SLOW))
    with ray_session.ray_session(Config(), "mark", tmp_path):
        assert done == ["start", "end mark", "start"]
        shutil.rmtree(os.environ[SCRATCH])  # as programs do that tidy /tmp
    (line,) = capsys.readouterr().out.splitlines()
    assert CHECK in line and f"try 2 of {START_TRIES}" in line
    starts(9, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"), ray_session.ray_session(Config(), "another mark", tmp_path):
        raise AssertionError("there is no Ray")
    assert done.count("start") == 3


def test_a_folder_that_ray_cannot_use_is_refused_with_the_variable_that_names_it(
    starts: Callable[..., list[str]], tmp_path: Path
) -> None:
    starts(9, OSError("AF_UNIX path length cannot exceed 107 bytes"))
    with pytest.raises(UserError) as refused, ray_session.ray_session(Config(), "mark", tmp_path):
        raise AssertionError("there is no Ray")
    assert str(refused.value).startswith(f"TMPDIR: Ray cannot keep its files in {tmp_path}: AF_UNIX path length")


def test_what_the_user_set_for_the_network_and_vllm_reaches_every_process_and_is_named(
    starts: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1", "UCX_TLS": "rc", "FI_PROVIDER": "efa"}
    given |= {"GLOO_SOCKET_IFNAME": "bond0", "VLLM_HF_CREDENTIAL": "hush"}
    for name, value in {**given, "MY_NCCL_DEBUG": "no"}.items():
        monkeypatch.setenv(name, value)
    settings: dict[str, Any] = {}
    starts(0, Exception())
    monkeypatch.setattr(ray_session.ray, "init", lambda **told: settings.update(told))
    with ray_session.ray_session(Config(), "mark", tmp_path):
        passed = settings["runtime_env"]["env_vars"]
    assert {name: passed.get(name) for name in given} == given and "MY_NCCL_DEBUG" not in passed
    (line,) = capsys.readouterr().out.splitlines()
    assert all(name in line for name in given) and "=" not in line and "NO_USAGE" not in line


@pytest.mark.parametrize("transport", ["memory", "ipc"])
def test_a_ray_of_ones_own_has_a_cpu_for_every_rank_and_engine(
    transport: str, starts: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"trainer": {"ranks": 500}, "generator": {"engines": 400}, "weights": {"transport": transport}}
    config, settings = Config.model_validate(parts), dict[str, Any]()
    starts(0, Exception())
    monkeypatch.setattr(ray_session.ray, "init", lambda **told: settings.update(told))
    with ray_session.ray_session(config, "mark"):
        assert sum(each.resources["CPU"] for each in run_bundles(config, gpus=1)) <= settings["num_cpus"]


def lives_on(dead: list[Any]) -> Never:
    """A run whose Ray has ended, or does not answer."""
    ray_session.worker._global_node = SimpleNamespace(dead_processes=lambda: dead, gcs_address="127.0.0.1:1")
    ray_session.LOOK_SECONDS, ray_session.SILENT_SECONDS = 0.1, 0.2
    ray_session._watch(threading.Event(), partial(print, flush=True))
    raise AssertionError("it was not ended")


@pytest.mark.parametrize(
    ("process", "said"), [("raylet", "Ray's raylet has ended"), ("dashboard", "127.0.0.1:1 has not answered for ")]
)
def test_a_run_ends_with_the_reason_once_its_ray_has_ended(process: str, said: str) -> None:
    with Forked(lives_on, [(process, None)]) as run:
        told = run.stdout.read()
        assert run.wait() == 1
    assert said in told


def test_a_stop_signal_before_the_watchdog_is_up_leaves_no_folder(
    starts: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts(0, Exception())

    def stopped(*words: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(ray_session, "start_watchdog", stopped)
    with pytest.raises(SystemExit), ray_session.ray_session(Config(), "mark", tmp_path):
        raise AssertionError("there is no Ray")
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_listens_and_does_not_answer_is_refused_with_the_likely_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(ray_session.ray, "init", init)
    monkeypatch.setattr(ray_session, "start_watchdog", lambda *words: None)
    monkeypatch.setenv(MARK, "")
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError) as refused, ray_session.ray_session(Config(), "mark", tmp_path):
            raise AssertionError("there is no Ray")
    assert str(refused.value).startswith(f"RAY_ADDRESS={address}: ") and "RAY_AUTH_TOKEN" in str(refused.value)
