"""Addresses of a model hub, against a server that speaks what huggingface_hub asks for."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from huggingface_hub import constants

from actors.driver import commands
from actors.driver import run as running
from service.config import load_config
from service.config.section import Named
from service.errors import UserError
from service.model_hub import download
from service.run.folder import REVISIONS
from tests.pure.rollout.conftest import served

FIRST, SECOND = "a" * 40, "b" * 40
ROWS = b'{"prompt": "?"}\n'
MODEL_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w",
    "pytorch_model.bin": b"p",
    "other/a.json": b"",
    "consolidated.safetensors": b"w",
}
FILES = {"models/org/tiny": MODEL_FILES, "datasets/org/words": {"main/train.jsonl": ROWS, "main/test.jsonl": b""}}
SETTINGS = ["model.make=null", "model.warm_start=null", "data.make_rows=null", "model.path=hf:org/tiny"]
SETTINGS += ["data.train=hf:org/words@v1:main/train.jsonl", "data.eval.a=hf:org/words@v1:main/test.jsonl"]
OF_COMMIT = [word.replace("org/tiny", f"org/tiny@{FIRST}").replace("@v1", f"@{FIRST}") for word in SETTINGS]
COPY = "where there is a network, and give the path of the copy"
MODEL, DATASET = Named("model folder", "folder"), Named("dataset")


class StubHub:
    """Two repositories whose branches and tags all lead to one commit."""

    def __init__(self) -> None:
        self.commit = FIRST
        self.sent: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/").removeprefix("api/")
        for repo, files in FILES.items():
            where = path.removeprefix(repo if request.path.startswith("/api/") else repo.removeprefix("models/"))
            if where == path:
                continue
            if where.startswith("/revision/"):
                return web.json_response({"id": repo.partition("/")[2], "sha": self.commit, "siblings": []})
            if where.startswith("/tree/"):
                sizes = {name: len(data) for name, data in files.items()}
                entries = [{"type": "file", "path": name, "size": n, "oid": name} for name, n in sizes.items()]
                return web.json_response(entries)
            _, resolve, commit, name = where.split("/", 3)
            if resolve == "resolve" and name in files:
                if request.method == "GET":
                    self.sent.append(name)
                headers = {"X-Repo-Commit": commit, "ETag": f'"{name}"'}
                return web.Response(body=files[name], headers=headers)
        return web.json_response({"error": "Repository not found"}, status=404)

    @asynccontextmanager
    async def serving(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """Serve, as the hub that HF_ENDPOINT names, which huggingface_hub reads when it is imported."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with served(app) as endpoint:
            monkeypatch.setattr(constants, "ENDPOINT", endpoint)
            of_a_file = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{")
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{{of_a_file[2]}")
            yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, of a user with a network, in a process of Baton, which is offline otherwise."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(commands, "USER_IS_OFFLINE", False)
    return tmp_path / "cache"


async def resolved(settings: list[str]) -> tuple[list[Path | None], dict[str, str]]:
    """The paths of model, training and evaluation rows as a run gets them, and the revisions."""
    config, revisions = await asyncio.to_thread(commands.downloaded, load_config(["configs/quickstart.yaml"], settings))
    return [config.model.path, config.data.train, config.data.eval["a"]], revisions


async def test_addresses_become_files_of_the_cache_which_also_serves_without_a_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = StubHub()
    async with hub.serving(monkeypatch):
        (model, train, held_out), revisions = await resolved(SETTINGS)
        assert sorted(hub.sent) == ["config.json", "main/test.jsonl", "main/train.jsonl", "model.safetensors"]
        assert revisions == {
            "model.path": f"hf:org/tiny is {FIRST}",
            "data.train": f"hf:org/words@v1:main/train.jsonl is {FIRST}",
            "data.eval.a": f"hf:org/words@v1:main/test.jsonl is {FIRST}",
        }
        assert model and train and model.is_relative_to(cache)
        assert (model / "model.safetensors").read_bytes() == b"w" and train.read_bytes() == ROWS
        assert (await resolved(SETTINGS))[0] == [model, train, held_out] and len(hub.sent) == 4
        hub.commit = SECOND
        assert (await resolved(OF_COMMIT))[0] == [model, train, held_out] and len(hub.sent) == 4
        assert (await resolved(SETTINGS))[1]["model.path"] == f"hf:org/tiny is {SECOND}"
    assert constants.HF_HUB_OFFLINE, "nothing else in the driver asks the hub"
    assert (await resolved(OF_COMMIT))[0] == [model, train, held_out]
    monkeypatch.setattr(commands, "USER_IS_OFFLINE", True)
    assert (await resolved(SETTINGS))[1]["data.train"].endswith(SECOND)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("named", "address", "line"),
    [
        (MODEL, "hf:a/b@v2", "`hf download a/b --repo-type model --revision v2 --local-dir DIR` " + COPY),
        (DATASET, "hf:a/b:m/c.parquet", "`hf download a/b --repo-type dataset --local-dir DIR` " + COPY),
        (DATASET, "hf:a/b", "is no address of a dataset on a hub; the form is hf:org/name@revision:file.parquet"),
        (MODEL, "hf:a/b:c", "is no address of a model folder on a hub; the form is hf:org/name@revision"),
    ],
)  # fmt: skip
def test_what_is_not_to_be_had_is_one_line_with_the_command_and_the_local_form(
    named: Named, address: str, line: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError) as caught:
        download("x.y", named, address, offline, lambda line: None)
    said = str(caught.value)
    assert said.startswith(f"x.y: {address} is ") and said.endswith(line) and "\n" not in said


@pytest.mark.usefixtures("cache")
async def test_a_file_that_a_dataset_does_not_have_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async with StubHub().serving(monkeypatch):
        with pytest.raises(UserError, match=rf"^x.y: the dataset org/words has no file c.jsonl at revision {FIRST}$"):
            await asyncio.to_thread(download, "x.y", DATASET, "hf:org/words:c.jsonl", False, lambda line: None)


def test_the_run_folder_has_the_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_run_on_ray", lambda *_: 0)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    config = load_config(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "model.warm_start=null"])
    revisions = {"model.path": f"hf:org/tiny is {FIRST}"}
    assert running.run(config, revisions=revisions) == 0
    assert json.loads((tmp_path / "quickstart" / REVISIONS).read_text()) == revisions
