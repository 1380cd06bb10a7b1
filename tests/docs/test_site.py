"""The documentation as a site: it builds without a warning, its examples run, its commands exist."""

import asyncio
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from service.cli.parser import main
from service.config import load
from service.handoff.steps.wire import encode as encode_group
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment
from service.rollout.prompts.dataset import load_tasks
from service.scorers.reply import Answer, answer_from
from service.scorers.scorer import Scorer
from tests.docs.test_readme import blocks as blocks_in
from tests.docs.test_readme import commands, importable, played, sound
from tests.pure.scorers.test_scorer import GROUP, TASKS, WORDS
from tests.waiting import ran

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return blocks_in(page.read_text(), language)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = ran(*build, folder=ROOT, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_the_site_builds_without_a_warning_and_every_page_is_in_its_menu(site: Path) -> None:
    pages = {str(page.relative_to(DOCS).with_suffix(".html")) for page in PAGES}
    assert {str(page.relative_to(site)) for page in site.rglob("*.html")} == pages | {"404.html"}
    menu = (site / "index.html").read_text()
    assert [page for page in pages if f'href="{page}"' not in menu and page != "index.html"] == []


def test_the_site_loads_nothing_from_elsewhere_and_shows_the_other_files(site: Path) -> None:
    assert "What is not covered" in (site / "security.html").read_text()
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", page.read_text())
        assert loaded and [address for address in loaded if "//" in address] == [], page.name


@pytest.mark.parametrize("page", [p for p in PAGES if ">>>" in p.read_text()], ids=lambda page: page.name)
def test_the_examples_of_a_page_give_what_they_show(page: Path) -> None:
    text = "\n".join(block for block in blocks(page, "python") if ">>>" in block)
    said = io.StringIO()
    example = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    result = doctest.DocTestRunner().run(example, out=said.write)
    assert result.attempted > 0 and result.failed == 0, said.getvalue()


OTHERS = {
    *("apt-get", "curl", "docker", "export", "harbor", "hf", "kubectl", "mkdir", "pip", "podman", "printf"),
    *("prometheus", "prometheus-alertmanager", "ray", "sbatch", "scancel", "scontrol", "sky", "source", "srun"),
}
"""Programs of others; `tests/e2e/test_monitoring.py`, `tests/deploy` and `tests/hosts/test_slurm.py` call them."""


@pytest.mark.parametrize("command", sorted(set(commands(PAGES))))
def test_a_command_of_the_pages_is_one_that_there_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands with a configuration that comes with Baton are tested further in `test_readme`."""
    words = shlex.split(command)
    if words[:2] == ["baton", "init"]:
        monkeypatch.chdir(tmp_path)
        assert main(words[1:]) == 0 and any(tmp_path.iterdir())
    elif words == ["baton", "quickstart"]:
        # That it trains is tested in `tests/e2e/test_package.py`.
        assert main(["quickstart", "run.no_such_setting=1"]) == 2
        assert "no_such_setting" in capsys.readouterr().err
    elif words[0] == "baton":
        # Here is neither a file nor a run, so a command that is written rightly gets as far as missing them.
        monkeypatch.chdir(tmp_path)
        # A recipe that comes with Baton is found from anywhere.
        words = [word.replace("configs/", "none/").replace("s3://", f"file://{tmp_path}/none/") for word in words]
        assert main(words[1:]) == 2
        said = capsys.readouterr().err
        named = r"hangman\.yaml|mine\.jsonl|mine\.yaml|none/|quickstart|smollm2|RUN|no run in runs"
        assert re.search(named, said), said
    elif words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
    else:  # the targets of make: `test_readme`; the order of kubectl's: `tests/deploy/test_manifests.py`
        assert words[0] in {"make", *OTHERS}
        assert [name for name in re.findall(r"deploy/[\w/.-]+", command) if not (ROOT / name).exists()] == []


def test_the_configuration_of_ones_own_is_right(tmp_path: Path) -> None:
    (text,) = blocks(DOCS / "own.md", "yaml")
    sound(text, tmp_path)
    assert set(yaml.safe_load(text)["env"]["options"]) == {"lives"}


def test_the_class_of_the_agents_page_is_tried_as_the_page_says(tmp_path: Path) -> None:
    agent, trial = (
        next(block for block in blocks(DOCS / "agents.md", "python") if words in block)
        for words in ("class MyAgent", "SimpleNamespace")
    )
    (tmp_path / "my_agents.py").write_text(agent)
    (tmp_path / "replies.txt").write_text("17")
    serving = subprocess.Popen(
        [sys.executable, "-m", "service", "agent-try", "--scripted", str(tmp_path / "replies.txt")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        found = next(filter(None, (re.search(r"BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", line) for line in serving.stdout)))
        code = textwrap.dedent(trial).replace("http://127.0.0.1:8400/s/0-0-0/v1", found[1]).replace("KEY", found[2])
        (tmp_path / "trial.py").write_text(code)
        tried = [sys.executable, str(tmp_path / "trial.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(tried, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert said.stdout == "1.0\n", said.stderr
    finally:
        serving.terminate()
        serving.communicate(timeout=60)


def test_the_environment_of_ones_own_plays_the_row(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(DOCS / "own.md", "python") if "class Hangman" in block]
    (row,) = blocks(DOCS / "own.md", "json")
    (tmp_path / "train.jsonl").write_text(row)
    (task,) = load_tasks(tmp_path / "train.jsonl")
    games = {
        ("a",): (0.0, False, "_a___, 2 lives"),
        ("b", "a", "x"): (0.0, False, "ba___, 1 lives"),
        ("b", "a", "I say t", "o", "n"): (1.0, True, ""),
        ("x", "y"): (0.0, True, ""),
    }
    with importable(tmp_path, "own_envs", code):
        for texts, last in games.items():
            first, said = asyncio.run(played("own_envs:Hangman", {"lives": 2}, task, [*texts]))
            assert list(first) == json.loads(row)["prompt"] and said[-1] == last


@pytest.mark.parametrize("page", ["scorers.md", "roles.md"])
def test_the_configurations_of_a_page_are_right(page: str, tmp_path: Path) -> None:
    for text in blocks(DOCS / page, "yaml"):
        sound(text, tmp_path, "model.make={}", "data.make_rows=8")


def test_the_judge_of_ones_own_scores_each_trajectory_and_says_why(tmp_path: Path) -> None:
    code, _ = [block for block in blocks(DOCS / "scorers.md", "python") if "def score" in block]
    answer = judged(code, tmp_path)
    assert answer.rewards == [1 / 3, 1 / 3] and answer.info == ["2 turns", "2 turns"]


def test_a_judge_behind_an_address_gets_the_texts_of_the_group(tmp_path: Path) -> None:
    _, code = [block for block in blocks(DOCS / "scorers.md", "python") if "def score" in block]
    bodies: list[list[dict[str, object]]] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"rewards": [0.25, 0.75]}).encode())

        def log_message(self, *of: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        answer = judged(code.replace(":8000/", f":{server.server_port}/"), tmp_path)
        thread.join(60)
    assert answer.rewards == [0.25, 0.75]
    assert [sorted(each) for each in bodies[0]] == [["task", "text"], ["task", "text"]]


def judged(code: str, folder: Path) -> Answer:
    """The answer of the page's judge with this code about a group of two trajectories."""
    (folder / "judge.yaml").write_text(blocks(DOCS / "scorers.md", "yaml")[0])
    make_tokenizer(folder, WORDS)
    with importable(folder, "my_judge", code):
        judge = Scorer("judge", load([folder / "judge.yaml"]).config.scorers["judge"], (), folder, TASKS)
        return answer_from(asyncio.run(judge.reply(0, encode_group(GROUP))), room=0)


def test_the_reward_of_ones_own_changes_only_the_reward(tmp_path: Path) -> None:
    (code,) = [block for block in blocks(DOCS / "own.md", "python") if "class ShortGsm8k" in block]
    task = Task("0", ({"role": "user", "content": "3 and 4 ?"},), "", {"ground_truth": "7"})

    async def reward(text: str) -> float:
        episode = make_environment("own_rewards:ShortGsm8k", {}, ["own_rewards"])
        assert tuple(await episode.reset(task, seed=0)) == task.prompt
        result = await episode.step(text)
        await episode.close()
        assert result.done and set(result.info) == {"marked", "too_long"}
        return result.reward

    async def rewards() -> list[float]:
        return [await reward(text) for text in ("3 + 4 = 7 #### 7", "it is 7", "it is 8", " ".join(["7"] * 150))]

    with importable(tmp_path, "own_rewards", code):
        assert asyncio.run(rewards()) == pytest.approx([1.0, 0.5, 0.0, 0.45])


def test_the_design_page_names_every_folder_of_the_code() -> None:
    text = (DOCS / "design.md").read_text()
    folders = [path.name for path in (ROOT / "service").iterdir() if (path / "__init__.py").is_file()]
    parts = [path.name for path in (ROOT / "actors").iterdir() if (path / "__init__.py").is_file()]
    assert [name for name in folders if f"`service/{name}/`" not in text] == []
    assert [name for name in parts if f"`{name}`" not in text] == []
