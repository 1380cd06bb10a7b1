"""The address of a store holds no secret, and a wrong one is refused in one line that shows none."""

from __future__ import annotations

import pytest

from service.cli import main
from service.store import objects
from service.store_url import SCHEMES, store_url_problem

QUICKSTART = ["--config", "configs/quickstart.yaml"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_address_with_a_bucket_and_a_path_is_fine(scheme: str) -> None:
    assert store_url_problem(f"{scheme}:///store/run" if scheme == "file" else f"{scheme}://bucket/team/run") is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://me:secret@bucket/run", "holds a user or password"),
        ("s3://secret@bucket/run", "holds a user or password"),
        ("az://box/run?sv=1&sig=secret", "has a part after ? or #"),
        ("s3://bucket/run#secret", "has a part after ? or #"),
        ("ftp://bucket/run", "its scheme 'ftp' is none of s3, gs, az, abfss, file"),
        ("bucket/run", "its scheme '' is none of"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket", "needs a path of the run's own in the bucket"),
        ("s3://bucket:x/run", "is no address"),
        ("file://host/run", "needs a path, such as file:///mnt/store/run"),
    ],
)
def test_a_wrong_address_is_refused_in_one_line_that_shows_no_secret(
    url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "validate", *QUICKSTART, f"run.store={url}"]) == 2
    told = capsys.readouterr().err
    assert why in told and told.count("\n") == 1 and "secret" not in told.replace("a secret", "")
    if "://" in url:
        assert main(["run", "--resume", url]) == 2
        told = capsys.readouterr().err
        assert why in told and told.count("\n") == 1 and "secret" not in told.replace("a secret", "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(objects, "find_spec", lambda name: None)
    assert main(["run", "--resume", "s3://bucket/run"]) == 2
    assert "the package obstore is not installed: pip install 'baton-rl[store]'" in capsys.readouterr().err


@pytest.mark.parametrize("variable", objects.ENDPOINTS)
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("http://me:secret@store:9000", "holds a user or password"),
        ("https://store:9000/?key=secret", "has a part after ? or #"),
        ("store:9000", "is no address of a server; give one like https://store:9000"),
        ("secret", "is no address of a server"),
        ("https://", "is no address of a server"),
        ("http://[::1", "is no address of a server"),
    ],
)
def test_a_wrong_endpoint_is_refused_in_one_line_that_shows_no_secret(
    variable: str, endpoint: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, endpoint)
    assert main(["run", "--resume", "s3://bucket/run"]) == 2
    told = capsys.readouterr().err
    assert f"{variable} {why}" in told and told.count("\n") == 1 and "secret" not in told.replace("a secret", "")


def test_an_address_that_the_library_refuses_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", "s3://bucket//run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
