"""The store against a server that speaks S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from service.cli import main
from service.config import load
from service.errors import StoreFailed, UserError
from service.run.folder import CONFIG
from service.run.resuming import resumed
from service.store import fetch
from service.store.contents import RUN
from service.store.objects import CHUNK_BYTES, CUT_OFF, LISTINGS, open_store
from service.store.uploads import claim_store
from tests.pure.store.scripted import ScriptedRun, settings
from tests.s3_server import BUCKET, FAULTS, KEY, SECRET, flaky_s3_server, s3_server
from tests.waiting import until

pytest.importorskip("obstore", reason="the package obstore is not installed")

URL = f"s3://{BUCKET}/run"
"""The store of one test; every other test that writes to the bucket adds a name of its own."""
Result = TypeVar("Result")


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)


def test_objects_of_any_size_come_back_as_they_were(s3: None) -> None:
    objects = open_store(f"{URL}-sizes")
    assert objects.sizes() == {}
    sizes = {"empty": 0, "a/small": 5, "a/b/large": 2 * CHUNK_BYTES + 5}
    for name, size in sizes.items():
        objects.put(name, (bytes([i % 251]) * min(1 << 20, size - i) for i in range(0, size, 1 << 20)), size)
    assert objects.sizes() == sizes
    large = b"".join(objects.get("a/b/large"))
    assert len(large) == sizes["a/b/large"] and large[5 << 20] == (5 << 20) % 251
    objects.put("a/small", [b"other"], 5)
    assert b"".join(objects.get("a/small")) == b"other"
    objects.delete(["empty", "a/b/large", "gone"])
    assert objects.sizes() == {"a/small": 5}


def test_a_run_goes_on_from_s3_on_an_empty_disk_and_nothing_of_it_holds_a_credential(s3: None, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    killed = ScriptedRun(first / "scripted", settings(first, store_deadline=60), open_store(URL))
    killed.train(5)
    said = list[str]()
    folder = fetch.fetched(open_store(URL), lambda file: load([file], [f"run.dir={second}"]).config, said.append)
    config = load([folder / CONFIG]).config
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, open_store(URL), manifest)
    run.train()
    run.end()
    whole = ScriptedRun(tmp_path / "third", settings(tmp_path), None)
    whole.train()
    assert run.history() == whole.history()
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    objects = open_store(URL)
    written += b"".join(b"".join(objects.get(name)) for name in objects.sizes())
    assert SECRET.encode() not in written and KEY.encode() not in written and SECRET not in "".join(said)


@pytest.mark.full
def test_a_run_goes_on_from_an_s3_that_fails_half_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{URL}-flaky"
    whole = ScriptedRun(tmp_path / "third", settings(tmp_path), None)
    whole.train()
    with flaky_s3_server(share=0.5) as (environment, flaky):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        first, second = tmp_path / "first", tmp_path / "second"
        killed = insisted(lambda: ScriptedRun(first / "scripted", settings(first, store_deadline=60), open_store(url)))
        killed.train(5)
        until(lambda: killed.uploads.status.step == 4, 120, lambda: killed.said)
        folder = insisted(
            lambda: fetch.fetched(open_store(url), lambda file: load([file], [f"run.dir={second}"]).config, print)
        )
        config = load([folder / CONFIG]).config
        with resumed(config.run, config.trainer, folder) as manifest:
            run = insisted(lambda: ScriptedRun(folder, config, open_store(url), manifest))
        run.train()
        run.end()
        assert {*flaky.met} == {*FAULTS, ""} and not run.uploads.left(), flaky.met
    assert run.history() == whole.history()


@pytest.mark.parametrize(("cut", "comes"), [(LISTINGS - 1, True), (LISTINGS, False)])
def test_a_listing_that_is_cut_off_while_a_run_claims_its_store_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, comes: bool
) -> None:
    url = f"{URL}-cut-{cut}"
    with flaky_s3_server(share=0.0) as (environment, flaky):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        faults = ["cut answer"] * cut
        monkeypatch.setattr(flaky, "fault", lambda path: faults.pop() if "list-type" in path and faults else "")
        if comes:
            claim_store(open_store(url), tmp_path, 1, 60.0, print).finish()
            assert RUN in open_store(url).sizes()
        else:
            with pytest.raises(UserError, match=f"^run.store: {url}: listing it: {CUT_OFF}"):
                claim_store(open_store(url), tmp_path, 1, 60.0, print)
        assert not faults


def insisted(attempt: Callable[[], Result]) -> Result:
    """The result of a command that its user repeats as often as it says that the store failed."""
    for _ in range(20):
        try:
            return attempt()
        except (StoreFailed, UserError) as failed:
            print(f"again: {failed}")
    raise AssertionError("the store failed twenty times in a row")


@pytest.mark.parametrize(
    ("url", "setting", "why"),
    [
        ("s3://no-such-bucket/run", {}, "listing it: there is no such bucket"),
        (URL, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "listing it: Error performing list request: "),
    ],
)
def test_a_store_that_cannot_be_used_is_one_short_line_without_credentials(
    s3: None, monkeypatch: pytest.MonkeyPatch, url: str, setting: dict[str, str], why: str
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreFailed) as failed:
        open_store(url).sizes()
    assert str(failed.value).startswith(f"{url}: {why}")
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 300 and KEY not in str(failed.value)


def test_the_command_refuses_a_store_that_cannot_be_read_before_anything_is_loaded(
    s3: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--resume", "s3://no-such-bucket/run"]) == 2
    assert capsys.readouterr().err == "baton: s3://no-such-bucket/run: listing it: there is no such bucket\n"
    assert main(["run", "--resume", "s3://bucket/empty"]) == 2
    assert capsys.readouterr().err == "baton: s3://bucket/empty holds no run; look for checkpoints/ in the store\n"


def test_a_folder_serves_as_a_store_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"store: opening it: there is no such folder$"):
        open_store(f"file://{tmp_path}/store")
    assert not (tmp_path / "store").exists(), "who only reads makes no folder"
    objects = open_store(f"file://{tmp_path}/store", create=True)
    objects.put("a/b", [b"x"], 1)
    assert objects.sizes() == {"a/b": 1} and (tmp_path / "store" / "a" / "b").read_bytes() == b"x"
    with pytest.raises(StoreFailed, match="reading nothing"):
        list(objects.get("nothing"))
    with pytest.raises(UserError, match="needs a path"):
        open_store("file:///")
