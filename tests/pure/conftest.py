"""A small model as a run makes it, for tests that read or spoil one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SLOW = [
    "actors/test_forced_end",
    "actors/test_generator_pool",
    "agents/test_handed_on",
    "agents/test_endpoint",
    "agents/test_connections",
    "agents/test_unruly",
    "agents/test_kills",
    "agents/test_play",
    "agents/test_commands",
    "buffer/test_curriculum",
    "cli/test_cli",
    "evaluation/test_eval_refused",
    "cli/test_phases",
    "cli/test_stopped_early",
    "config/test_sized_recipes",
    "gpu/test_make_gpu",
    "house/test_setup",
    "learn/test_checkpoint",
    "learn/test_compile",
    "learn/test_families",
    "learn/test_fit",
    "learn/test_full_state_dict",
    "learn/test_lora",
    "learn/test_merge",
    "learn/test_names",
    "learn/test_proof",
    "learn/test_sequence_parallel",
    "learn/test_sharding",
    "learn/test_shards",
    "learn/test_shared_prefix",
    "learn/test_split",
    "learn/test_trial",
    "metrics/test_ledger_watch",
    "metrics/test_not_learning",
    "metrics/test_odd_status",
    "plan/test_plan",
    "prepare/test_prepare",
    "rollout/test_isolation",
    "rollout/test_sql_limits",
    "scorers/test_asking",
    "store/test_fetch",
    "store/test_run",
    "store/test_s3",
]
"""Files that start processes or train a model, and take three seconds and more: `make test-fast` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow files."""
    folder = Path(__file__).parent
    slow = {folder / f"{name}.py" for name in SLOW}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the quick start makes."""
    from actors.driver.prepare import prepare  # here, because the process that only hands out tests needs no torch
    from service.config import load_config

    return prepare(load_config(["configs/quickstart.yaml"]), tmp_path_factory.mktemp("made")).model_folder


@pytest.fixture
def model(made_model: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(made_model, tmp_path / "model"))
