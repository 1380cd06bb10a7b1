"""The store against a server that speaks S3, and its address: a wrong one is refused in one line without secrets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.config import load
from service.errors import StoreFailed
from service.run.folder import CONFIG
from service.run.preparing.resuming import resumed
from service.store import fetch, objects
from service.store import uploads as uploading
from service.store.objects import PART_BYTES, Objects
from service.store_url import SCHEMES, store_url_problem
from tests.pure.conftest import Refused
from tests.pure.store.scripted import ScriptedRun, settings
from tests.s3_server import BUCKET, KEY, SECRET, s3_server
from tests.waiting import until

pytest.importorskip("obstore", reason="the package obstore is not installed")

URL = f"s3://{BUCKET}/run"
"""The store of one test; every other test that writes to the bucket adds a name of its own."""
QUICKSTART = ["--config", "configs/quickstart.yaml"]


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)


def test_objects_of_any_size_come_back_as_they_were_and_none_is_created_twice(s3: None, tmp_path: Path) -> None:
    store, file = Objects(f"{URL}-sizes"), tmp_path / "file"
    assert store.names() == []
    sizes = {"a/b/large": 2 * PART_BYTES + 5, "a/small": 5, "empty": 0}
    for name, size in sizes.items():
        file.write_bytes(bytes(range(251)) * (size // 251) + bytes(size % 251))
        with file.open("rb") as opened:
            assert store.put(name, opened) == size
        assert b"".join(store.get(name)) == file.read_bytes()
    assert store.names() == list(sizes)
    assert store.create("made", b"one") and store.create("made", b"one") and not store.create("made", b"two")
    assert b"".join(store.get("made")) == b"one"
    store.delete(["empty", "a/b/large", "gone", "made"])
    assert store.names() == ["a/small"]


def test_a_run_goes_on_from_s3_on_an_empty_disk_and_nothing_of_it_holds_a_credential(s3: None, tmp_path: Path) -> None:
    whole = ScriptedRun(tmp_path / "third", settings(tmp_path), None)
    whole.train()
    url, first, second = f"{URL}-whole", tmp_path / "first", tmp_path / "second"
    killed = ScriptedRun(first / "scripted", settings(first), Objects(url))
    killed.train(5)
    until(lambda: killed.uploads.status.step == 4, 120, lambda: killed.said)
    config = load([fetch.from_store(url, lambda file: load([file], [f"run.dir={second}"]).config) / CONFIG]).config
    folder = second / "scripted"
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, Objects(url), manifest)
    run.train()
    run.end()
    assert run.history() == whole.history()
    stored, said = Objects(url), "".join(killed.said + run.said)
    written = b"".join(b"".join(stored.get(name)) for name in stored.names())
    written += b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert SECRET.encode() not in written and KEY.encode() not in written and SECRET not in said


@pytest.mark.parametrize(
    ("url", "setting", "why"),
    [
        ("s3://no-such-bucket/run", {}, "listing it: NoSuchBucket"),
        (URL, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "listing it: Generic S3 error: "),
        (URL, {"AWS_ENDPOINT_URL": f"http://me:{SECRET}@127.0.0.1:1"}, "listing it: "),
    ],
)
def test_a_store_that_cannot_be_used_is_one_short_line_without_credentials(
    s3: None, monkeypatch: pytest.MonkeyPatch, url: str, setting: dict[str, str], why: str
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreFailed) as failed:
        Objects(url).names()
    said = str(failed.value)
    assert said.startswith(f"{url}: {why}")
    assert "\n" not in said and len(said) < 300 and KEY not in said and SECRET not in said


def test_the_command_refuses_a_store_that_cannot_be_read_before_anything_is_loaded(
    s3: None, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused("run", "--resume", "s3://no-such-bucket/run")
    assert said == "baton: s3://no-such-bucket/run: listing it: NoSuchBucket\n"
    assert "s3://bucket/empty holds no checkpoint of a run" in refused("run", "--resume", "s3://bucket/empty")
    refused("run", "--resume", "s3://bucket//run")
    monkeypatch.setattr(objects, "find_spec", lambda name: None)
    said = refused("run", "--resume", "s3://bucket/run")
    assert "the package obstore is not installed: pip install 'baton-rl[store]'" in said


def test_a_folder_serves_as_a_store_too(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path / "scripted", settings(tmp_path), None)
    run.uploading = uploading.Uploads(f"file://{tmp_path}/store", run.folder, None, 2, print)
    run.train(2)
    run.end()
    assert (tmp_path / "store" / "step_2" / "manifest.json").exists()
    assert (tmp_path / "store" / "summary.json").read_bytes() == (run.folder / "summary.json").read_bytes()
    with pytest.raises(StoreFailed, match="reading nothing"):
        list(Objects(f"file://{tmp_path}/store").get("nothing"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://secret@bucket/run", "has a user or a part after ? or #"),
        ("az://box/run?sv=1&sig=secret", "has a user or a part after ? or #"),
        ("s3://bucket/run#secret", "has a user or a part after ? or #"),
        ("ftp://bucket/run", "its scheme 'ftp' is none of s3, gs, az, abfss, file"),
        ("bucket/run", "its scheme '' is none of"),
        ("s3:///run", "needs a bucket and a path of the run's own"),
        ("s3://bucket", "needs a bucket and a path of the run's own"),
        ("s3://bucket:x/run", "is no address"),
        ("file://host/run", "needs a bucket and a path of the run's own"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line_that_shows_no_secret(url: str, why: str, refused: Refused) -> None:
    for scheme in SCHEMES:
        assert store_url_problem(f"{scheme}://{'' if scheme == 'file' else 'bucket'}/team/run") is None
    told = refused("config", "validate", *QUICKSTART, f"run.store={url}")
    assert why in told and "secret" not in told.replace("a secret", "")
