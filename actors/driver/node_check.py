"""Checks every node where a rank or an engine will run, before anything loads: its GPUs, and the files of the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import in_a_line
from actors.driver.placement import Bundle
from service.errors import RunFailed, UserError

NODE_SECONDS = 300.0
"""Maximum seconds to wait for the answers of all nodes. The first process on a node may take long, because it reads
Python's packages from disk."""


class RunFiles(NamedTuple):
    """The files that every node must have at the same path as the driver."""

    sizes: Mapping[str, int | None]
    """Size in bytes of each file by path; None for a folder."""
    written: str | None = None
    """The run folder, into which ranks and engines write; None: there is none."""

    @staticmethod
    def of(model_folder: Path, data: Iterable[Path], run_folder: Path | None = None) -> RunFiles:
        """Return the model folder and all its files, the data sets, and the run folder, if there is one."""
        files = sorted(path for path in model_folder.iterdir() if path.is_file())
        sizes = {str(model_folder): None} | {str(path): path.stat().st_size for path in (*files, *data)}
        return RunFiles(sizes, None if run_folder is None else str(run_folder))

    def problem(self) -> str | None:
        """Return a text about the first path that does not exist on this machine, has another size than on the driver's
        machine, or may not be read or written; None if there is no such path."""
        for path, size in self.sizes.items():
            if not os.path.exists(path):
                return f"has no {path}"
            if not os.access(path, os.R_OK):
                return f"may not read {path}"
            if size is not None and (found := os.path.getsize(path)) != size:
                return f"has another {path}, of {found} bytes instead of {size}"
        if self.written is not None and not os.access(self.written, os.W_OK):
            return f"cannot write into the run folder {self.written}"
        return None


def check_nodes(room: PlacementGroup, bundles: Sequence[Bundle], files: RunFiles) -> None:
    """Check each node that has a bundle of the placement group.

    Raises:
        UserError: a node cannot use its GPUs or lacks a file; the message has a line for each such node.
        RunFailed: a node did not answer.
    """
    bundle_of = {node: bundle for bundle, node in placement_group_table(room)["bundles_to_node_id"].items()}
    here = bundle_of.pop(ray.get_runtime_context().get_node_id(), None)
    gpus = [bundle.resources.get("GPU", 0) for bundle in bundles]
    asked = [
        ray.remote(look)
        .options(num_cpus=0, num_gpus=gpus[bundle], scheduling_strategy=PlacementGroupSchedulingStrategy(room, bundle))
        .remote(files, gpus[bundle] > 0)
        for bundle in bundle_of.values()
    ]
    said = [] if here is None else [look(files, gpus[here] > 0)]
    try:
        said += ray.get(asked, timeout=NODE_SECONDS)
    except ray.exceptions.RayError as error:
        nodes = ", ".join(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in bundle_of)
        raise RunFailed(
            f"one of the nodes {nodes} did not answer the check of its files: {in_a_line(error)}"
        ) from error
    if lines := sorted(filter(None, said)):
        raise UserError("\n".join(lines))


def look(files: RunFiles, on_gpu: bool) -> str | None:
    """Return one line with the reason why this node cannot take part in the run; None if it can."""
    where = f"node {ray.util.get_node_ip_address()}"
    if on_gpu:
        from actors.cuda import unusable_cuda  # imports torch, which takes seconds

        if (why := unusable_cuda()) is not None:
            return f"{where} has GPUs, but PyTorch cannot use them: {why}"
    if (lacks := files.problem()) is None:
        return None
    return f"{where} {lacks}; ranks or engines run there: every node needs the same files at the same paths"
