"""Starts a separate Ray for a benchmark, on this machine, without a dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_ray(folder: str) -> Iterator[None]:
    """Within the block Ray runs, with its files in `folder`; its processes can import code of the current folder."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
        _temp_dir=folder,
    )
    try:
        yield
    finally:
        ray.shutdown()
