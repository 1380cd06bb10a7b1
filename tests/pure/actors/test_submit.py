"""A run as a Ray job: the command, the retries, and the refusals."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError, RpcError

from actors.driver import submit_job as submitting
from actors.driver.authentication import refuse_open_ray
from actors.driver.submit_job import entrypoint, submit
from service.backoff import Backoff
from service.cli.parser import main
from service.errors import RunFailed, UserError
from service.run.phases import phase


class FakeClient:
    """A cluster that is still starting for some calls, then runs the job to a status."""

    def __init__(self, refusals: int, status: str = "SUCCEEDED") -> None:
        self.refusals = refusals
        self.status = status
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, address: str | None) -> "FakeClient":
        return self

    def submit_job(self, **job: Any) -> str:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RuntimeError("Request failed with status code 500: No available agent to submit job")
        self.jobs.append(job)
        return "job-1"

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield "step 1\n"
        yield "step 2\x1b[2J\n"

    def get_job_status(self, job: str) -> str:
        return self.status


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "RETRY", Backoff(0.0))
    monkeypatch.setenv(submitting.ADDRESS, "")  # restored afterwards: an address that is asked for is put there


def test_the_command_names_files_as_the_copy_has_them(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    command = entrypoint([tmp_path / "configs/a.yaml", Path("b.yaml")], ["run.name=a b", "--run.seed", "3"], tmp_path)
    where, _, words = command.partition(" && exec ")
    assert where == f'cd "${{PYTHONPATH%%:*}}"/{tmp_path.name}'
    assert words == "baton run --config configs/a.yaml --config b.yaml 'run.name=a b' --run.seed 3"
    with pytest.raises(UserError, match=r"outside\.yaml: not inside"):
        entrypoint([tmp_path.parent / "outside.yaml"], [], tmp_path)


def test_a_cluster_that_is_still_starting_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(refusals=3)
    assert submit("baton run", None, follow=True, connect=client) == 0
    assert client.jobs[0]["entrypoint"] == "baton run"
    assert ".venv" in client.jobs[0]["runtime_env"]["excludes"]
    assert capsys.readouterr().out.endswith("step 1\nstep 2\\x1b[2J\njob-1: SUCCEEDED\n")


def test_a_failed_job_is_exit_code_1_and_one_that_is_not_followed_is_0() -> None:
    assert submit("x", None, follow=True, connect=FakeClient(0, "FAILED")) == 1
    assert submit("x", None, follow=False, connect=FakeClient(0, "FAILED")) == 0


def test_a_cluster_that_never_answers_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitting, "START_SECONDS", 0.0)

    def nobody(address: str | None) -> Any:
        raise ConnectionError("Failed to connect to Ray at address: http://127.0.0.1:1.\nmore")

    with pytest.raises(UserError, match=r"^--address: the cluster at http://127\.0\.0\.1:1: Failed to connect"):
        submit("x", "http://127.0.0.1:1", follow=True, connect=nobody)


def test_a_head_whose_agent_found_its_port_taken_is_told_which_option_gives_it_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submitting, "START_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"No available agent .*; if another Ray runs there: .*agent-listen-port=\d+$"):
        submit("x", None, follow=True, connect=FakeClient(9))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AuthenticationError("Ray couldn't find a token"),
            "there is no token; ~/.ray",
        ),
        (AuthenticationError("Forbidden: Invalid authentication token"), "the cluster refuses the token; ~/.ray"),
        (
            ValueError("Invalid address format: nowhere"),
            "nowhere (a dashboard's address is of the form http://HOST:8265)",
        ),
        (RpcError("Timed out while waiting for GCS"), "of the form http://HOST:8265"),
    ],
)
def test_a_wrong_token_or_address_is_one_clear_error(error: Exception, said: str) -> None:
    def refusing(address: str | None) -> Any:
        raise error

    with pytest.raises(UserError, match=r"^--address: the cluster at http://head:1: [^\n]+$") as refused:
        submit("x", "http://head:1", follow=True, connect=refusing)
    assert said in str(refused.value)


def test_the_address_that_is_asked_for_counts_more_than_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.dashboard.utils import get_address_for_submission_client

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    found: list[str] = []
    client = FakeClient(0)

    def connect(address: str | None) -> Any:
        found.append(get_address_for_submission_client(address))
        return client

    assert submit("x", "http://head:1", follow=False, connect=connect) == 0
    assert found == ["http://head:1"]


def test_it_says_at_once_what_it_does_and_then_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submitting, "phase", partial(phase, seconds=0.01))
    said = ""

    class Slow(FakeClient):
        def submit_job(self, **job: Any) -> str:
            nonlocal said
            said += capsys.readouterr().out
            self.refusals = 0 if "waiting for" in said else 1
            return super().submit_job(**job)

    assert submit("x", "http://head:1", follow=False, connect=Slow(0)) == 0
    assert said.startswith("submitting the job to the cluster at http://head:1 ...\n")
    assert "waiting for the cluster, which may still be starting: Request failed with status code 500" in said
    assert capsys.readouterr().out.endswith("stop it with: ray job stop --address http://head:1 job-1\n")


def test_a_cluster_that_goes_away_while_its_job_is_followed_is_one_clear_error() -> None:
    class Gone(FakeClient):
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "step 1\n"
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    with pytest.raises(RunFailed, match=r"stopped answering .*close code 1006\); job-1 may still run"):
        submit("x", None, follow=True, connect=Gone(0))


def test_an_interrupt_stops_the_following_and_says_that_the_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(FakeClient):
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "step 1\n"
            raise KeyboardInterrupt

    assert submit("x", None, follow=True, connect=Interrupted(0)) == 130
    assert capsys.readouterr().out.endswith("job-1 goes on; show its output with: ray job logs --follow job-1\n")


def test_a_refused_job_is_not_tried_again() -> None:
    class Refusing(FakeClient):
        def submit_job(self, **job: Any) -> str:
            self.jobs.append(job)
            raise RuntimeError("working_dir is too large")

    client = Refusing(0)
    with pytest.raises(UserError, match="too large"):
        submit("x", None, follow=True, connect=client)
    assert len(client.jobs) == 1


def test_an_open_ray_is_refused_unless_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_open_ray({}, insecure_local=False)
    refuse_open_ray({"RAY_AUTH_MODE": "token"}, insecure_local=False)
    refuse_open_ray({"RAY_AUTH_MODE": "disabled"}, insecure_local=True)
    with pytest.raises(UserError, match=r"RAY_AUTH_MODE=disabled: .*run\.insecure_local=true"):
        refuse_open_ray({"RAY_AUTH_MODE": "disabled"}, insecure_local=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert main(["submit", "--config", "configs/quickstart.yaml"]) == 2
    assert "anybody who reaches this machine's ports" in capsys.readouterr().err
