"""Installing what some tests need: quick where it is there, bounded where apt-get hangs, never an error."""

import shutil
import sys
import time
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def servers() -> Iterator[ModuleType]:
    """`scripts/servers.py` as a module."""
    spec = spec_from_file_location("servers", ROOT / "scripts" / "servers.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["servers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["servers"]


@pytest.fixture
def bare(servers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of root's with nothing on its path but what a test puts into this folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    shell = shutil.which("sh")
    sleep = shutil.which("sleep")
    assert shell is not None and sleep is not None
    (folder / "sh").symlink_to(shell)
    (folder / "sleep").symlink_to(sleep)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("BATON_SERVERS", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(servers, "POLICY", tmp_path / "policy-rc.d")
    return folder


def program(folder: Path, name: str, script: str = "exit 0") -> None:
    (folder / name).write_text(f"#!{folder}/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_where_everything_is_there_nothing_is_run(
    servers: ModuleType, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(bare, "apt-get", f"echo > {tmp_path}/ran")
    for name in ("prometheus", "alertmanager", "chromium-browser", "slurmctld"):
        program(bare, name)
    assert servers.main() == 0
    assert not (tmp_path / "ran").exists() and capsys.readouterr().out == ""


def test_what_is_missing_is_installed_and_no_service_is_started(
    servers: ModuleType, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(bare, "prometheus")
    log, policy = tmp_path / "log", tmp_path / "policy-rc.d"
    links = "".join(
        f"{link()} -sf {bare}/prometheus {bare}/{name};" for name in ("alertmanager", "chromium", "slurmctld")
    )
    program(bare, "apt-get", f'echo "$@" >> {log}; [ -x {policy} ] && echo policy >> {log}; {links}')
    assert servers.main() == 0
    said = log.read_text().splitlines()
    assert said[0].endswith(" update") and said[2].endswith(
        " install -y --no-install-recommends prometheus-alertmanager chromium slurm-wlm"
    )
    assert said[1] == said[3] == "policy" and not policy.exists()
    assert "skipped" not in capsys.readouterr().out


def link() -> str:
    found = shutil.which("ln", path="/usr/bin:/bin")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("script", "deadline", "reason"),
    [
        ("echo 'E: Unable to locate package chromium'; exit 100", 200.0, "Unable to locate package"),
        ("exit 100", 200.0, "apt-get install failed: 100"),
        ("sleep 500", 1.0, "took too long"),
    ],
)
def test_an_apt_that_refuses_or_hangs_is_no_error(
    script: str, deadline: float, reason: str, servers: ModuleType, bare: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(servers, "DEADLINE", deadline)
    program(bare, "apt-get", script)
    began = time.monotonic()
    assert servers.main() == 0
    assert time.monotonic() - began < 400
    said = capsys.readouterr().out
    assert (
        "without prometheus, prometheus-alertmanager, chromium, slurm-wlm, whose tests are skipped" in said
        and reason in said
    )
    assert not (tmp_path / "policy-rc.d").exists()


def test_nothing_is_installed_where_it_may_not_be(
    servers: ModuleType, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert servers.main() == 0
    assert "there is no apt-get" in capsys.readouterr().out
    program(bare, "apt-get", f"echo > {tmp_path}/ran")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert servers.main() == 0
    assert "only root can install them: apt-get install prometheus" in capsys.readouterr().out
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("BATON_SERVERS", "no")
    assert servers.main() == 0
    assert "BATON_SERVERS=no" in capsys.readouterr().out and not (tmp_path / "ran").exists()


def test_a_policy_of_the_machine_stays(servers: ModuleType, tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("its own")
    with servers.services_stay_down(policy):
        assert policy.read_text() == "its own"
    assert policy.read_text() == "its own"
