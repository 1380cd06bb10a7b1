"""One Ray for all end-to-end tests of a session; it and everything on it ends with the session."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from actors import RAY_ENV


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray  # reads its settings from the environment when it is imported, so `actors` has to come first

    assert RAY_ENV.keys() <= os.environ.keys()
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
