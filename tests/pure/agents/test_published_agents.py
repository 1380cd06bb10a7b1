"""Agents as they are published, run as commands: a file is edited, and the session has exact tokens."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.agents.call_roles import roles_of
from service.agents.commands import AgentRunner, Finished
from service.config.rollout import CommandConfig
from service.handoff.steps.values import Role
from service.rollout.chat.chat import Chat
from service.rollout.environment import Message, Task
from tests.pure.agents.endpoint import House, opened, whole
from tests.pure.agents.own_environment import IN_TIME, INSTALL_SECONDS, INSTALLED, python_with
from tests.pure.agents.test_oracles import MINI

CODEX = "@openai/codex@0.169"
ON_NODE = {
    "pi": ("@mariozechner/pi-coding-agent@0.73.1", "bash"),
    "qwen": ("@qwen-code/qwen-code@0.24.4", "run_shell_command"),
    "opencode": ("opencode-ai@1.18.33", "bash"),
}
"""Agents that reserve far more address space than memory: their packages, and their tools that run a command."""
OPENCODE = """printf %s '{"provider": {"b": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{base_url}",
"apiKey": "{env:OPENAI_API_KEY}"}, "models": {"policy": {}}}}, "model": "b/policy"}' > opencode.json; exec "$0" run "$1"
"""
PI = """mkdir -p ~/.pi/agent; printf %s '{"providers": {"b": {"baseUrl": "{base_url}", "apiKey": "OPENAI_API_KEY",
"api": "openai-completions", "models": [{"id": "policy", "name": "policy", "input": ["text"]}]}}}
' > ~/.pi/agent/models.json; exec "$0" --provider b --model policy --no-session -p "$1"
"""
EDIT = "sed -i s/red/blue/ colour.txt; cat colour.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TASK = Task("p", (Message(role="user", content="Make the colour blue."),), "", {}, {"files": {"colour.txt": "red"}})

pytestmark = [pytest.mark.full, pytest.mark.slow, IN_TIME]


def from_npm(name: str, package: str) -> Path:
    """The program of a package of npm."""
    folder = INSTALLED / name
    if not (program := folder / "node_modules" / ".bin" / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", folder, package]
        if shutil.which("npm") is None or subprocess.run(command, timeout=INSTALL_SECONDS).returncode:
            pytest.skip(f"{package} cannot be installed")
    return program


@pytest.fixture(scope="module")
def codex() -> Path:
    """Codex CLI."""
    return from_npm("codex", CODEX)


@pytest.fixture(scope="module")
def mini() -> Path:
    """mini-swe-agent, from PyPI; litellm, which it calls, needs mcp."""
    return python_with(*MINI).with_name("mini")


async def played(
    chat: Chat, replies: Iterator[str], command: list[Any], aside: str = "no such question", **settings: Any
) -> tuple[Finished, House, list[str]]:
    """A run of the command at a real endpoint, whose policy gives these replies, beside others where it is asked for
    something `aside`; also the roles of the calls."""
    async with opened(chat) as house:
        house.allowed = replace(house.allowed, max_input_length=400_000)
        house.max_tokens = 1_000_000
        house.say = lambda prompt: "A title" if aside in prompt else next(replies)
        session = house.session()
        score = ("grep", "-qx", "blue", "colour.txt")
        runner = AgentRunner(CommandConfig(command=tuple(map(str, command)), score=score, **settings))
        try:
            return await runner.run(TASK, session.base_url, session.key, 0), house, roles_of(session.tree.calls)
        finally:
            await runner.close()


def called(tool: str, argument: str, command: str) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"{argument}": "{command}"}}}}</tool_call>'


async def test_codex_edits_a_file_and_its_calls_are_one_exact_chain(bytes_chat: Chat, codex: Path) -> None:
    provider = 'model_providers.b={name="b",base_url="{base_url}",wire_api="responses",env_key="OPENAI_API_KEY"}'
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=b"]
    replies = iter([called("exec_command", "cmd", EDIT), "Done."])
    got, house, roles = await played(
        bytes_chat, replies, [codex, "exec", *flags, "-c", provider, "-m", "policy", "{prompt}"]
    )
    assert (got.reward, got.status) == (1.0, "ok"), got
    assert "Done." in got.transcript
    first, second = sorted(house.steps, key=lambda step: step.index)
    assert second.extends is not None and second.extends.step == first.index and roles == [Role.MAIN] * 2
    assert whole(house.steps) == house.prompts


@pytest.mark.parametrize("name", ON_NODE)
async def test_an_agent_on_node_js_edits_a_file_with_the_default_limits(bytes_chat: Chat, name: str) -> None:
    package, tool = ON_NODE[name]
    program = from_npm(name, package)
    command = [program, "--yolo", "--auth-type", "openai", "--model", "policy", "-p", "{prompt}"]
    if name != "qwen":
        command = ["sh", "-c", PI if name == "pi" else OPENCODE, program, "{prompt}"]
    replies = iter([called(tool, "command", EDIT), *["Done."] * 3])
    got, house, roles = await played(bytes_chat, replies, command, "title generator")
    assert (got.reward, got.status) == (1.0, "ok"), got
    assert whole(house.steps) == house.prompts
    aside = [Role.AUX] * (name == "opencode")  # a title
    assert sorted(roles) == [*aside, Role.MAIN, Role.MAIN]


async def test_mini_swe_agent_edits_a_file_and_its_calls_are_one_exact_chain(bytes_chat: Chat, mini: Path) -> None:
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "true"}
    replies = iter([called("bash", "command", EDIT), called("bash", "command", SUBMIT)])
    flags = ["--yolo", "--exit-immediately", "--model", "openai/policy", "--task", "{prompt}"]
    got, house, roles = await played(bytes_chat, replies, [mini, *flags], variables=variables)
    assert (got.reward, got.status) == (1.0, "ok"), got
    first, second = sorted(house.steps, key=lambda step: step.index)
    assert second.extends is not None and second.extends.step == first.index and roles == [Role.MAIN] * 2
    assert whole(house.steps) == house.prompts
