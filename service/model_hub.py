"""Settings may have an address on a model hub in place of a path. The driver downloads the files, and replaces the
address by a path in the hub's cache.

model.path: hf:org/name@revision              a model; the revision is a branch, a tag or a commit, and may be left out
data.train: hf:org/name@revision:file.parquet       a file of a dataset
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.config.paths import ADDRESS
from service.config.section import HUB, Named
from service.errors import UserError, in_one_line

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Patterns of the files of a model that are downloaded; files of pickled weights are never downloaded."""


def download(setting: str, named: Named, address: str, offline: bool, say: Callable[[str], None]) -> tuple[Path, str]:
    """Download the model or file at an address as far as the cache lacks it; returns its path and its commit.

    `offline`: use only the cache.

    Raises:
        UserError: the address is malformed, the hub has nothing there, or there is neither a network nor a cached copy.
    """
    found = ADDRESS.fullmatch(address)
    of_dataset = named.kind != "folder"
    if found is None or of_dataset != (found["file"] is not None):
        form = f"{HUB}org/name@revision" + (":file.parquet" if of_dataset else "")
        raise UserError(f"{setting}: {address:.200} is no address of a {named.what} on a hub; the form is {form}")
    repo, revision, file = found["repo"], found["revision"], found["file"]
    # imported here because it takes half a second
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its HTTP client's
        HTTPError,
        RevisionResolutionError,
        XetDownloadError,
    )

    say(f"{setting}: looking for {address} on the hub and in its cache")
    files, kind, ignored = ([file], "dataset", None) if file else (list(MODEL_FILES), "model", ["*/*", "consolidated*"])
    # Only here may huggingface_hub use the network in the driver, unless `offline`.
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, offline
    try:
        folder = Path(
            snapshot_download(repo, repo_type=kind, revision=revision, allow_patterns=files, ignore_patterns=ignored)
        )
    except (OSError, ValueError, HTTPError, RevisionResolutionError, XetDownloadError) as error:
        why = in_one_line(str(error.__cause__ or error))[:120]
        command = (
            f"hf download {repo} --repo-type {kind}{f' --revision {revision}' if revision else ''} --local-dir DIR"
        )
        raise UserError(
            f"{setting}: {address} is not in the cache and cannot be downloaded ({why}); run `{command}` where "
            "there is a network, and give the path of the copy"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
    path = folder / (file or "")
    if not path.exists():
        raise UserError(f"{setting}: the dataset {repo} has no file {file} at revision {folder.name}")
    return path, folder.name
