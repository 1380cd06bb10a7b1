"""One Ray for all end-to-end tests of a session; it and everything on it ends with the session."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
            _temp_dir=folder,
        )
        yield
        ray.shutdown()
