"""Agents as they are published, run as commands: a file is edited, and the session has exact tokens."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from service.agents.call_roles import roles_of
from service.agents.commands import AgentRunner
from service.config.rollout import CommandConfig
from service.handoff.steps.values import Role
from service.rollout.chat.chat import Chat
from service.rollout.environment import Message, Task
from tests.pure.agents.endpoint import opened, whole
from tests.pure.agents.own_environment import IN_TIME, INSTALL_SECONDS, INSTALLED, python_with

CODEX = 'model_providers.b={name="b",base_url="{base_url}",wire_api="responses",env_key="OPENAI_API_KEY"}'
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


class Published(NamedTuple):
    """An agent: its package of npm, or none for the one from PyPI; its tool that runs a command; how it is started."""

    package: str
    tool: str
    command: tuple[str, ...]
    """Follows its program; or, if it begins with `sh`, gets the program as its argument."""
    argument: str = "command"
    """Of the tool: what it runs."""


AGENTS: Mapping[str, Published] = {
    "codex": Published(
        "@openai/codex@0.169",
        "exec_command",
        (
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=b"),
            *("-c", CODEX, "-m", "policy", "{prompt}"),
        ),
        argument="cmd",
    ),
    # These reserve far more address space than memory.
    "pi": Published("@mariozechner/pi-coding-agent@0.73.1", "bash", ("sh", "-c", PI)),
    "qwen": Published(
        "@qwen-code/qwen-code@0.24.4",
        "run_shell_command",
        ("--yolo", "--auth-type", "openai", "--model", "policy", "-p", "{prompt}"),
    ),
    "opencode": Published("opencode-ai@1.18.33", "bash", ("sh", "-c", OPENCODE)),
    "mini": Published("", "bash", ("--yolo", "--exit-immediately", "--model", "openai/policy", "--task", "{prompt}")),
}
VARIABLES = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "true"}
"""Of mini-swe-agent."""


def from_npm(name: str, package: str) -> Path:
    """The program of a package of npm."""
    folder = INSTALLED / name
    if not (program := folder / "node_modules" / ".bin" / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", folder, package]
        if shutil.which("npm") is None or subprocess.run(command, timeout=INSTALL_SECONDS).returncode:
            pytest.skip(f"{package} cannot be installed")
    return program


@pytest.mark.parametrize("name", AGENTS)
async def test_a_published_agent_edits_a_file_and_its_own_calls_are_one_exact_chain(
    bytes_chat: Chat, name: str
) -> None:
    agent = AGENTS[name]
    if agent.package:
        program = str(from_npm(name, agent.package))
    else:  # litellm, which it calls, needs mcp
        program = str(python_with("mini-swe-agent==2.4.6", "mcp").with_name("mini"))
    command = (*agent.command, program, "{prompt}") if agent.command[0] == "sh" else (program, *agent.command)
    settings = CommandConfig(command=command, score=("grep", "-qx", "blue", "colour.txt"), variables=VARIABLES)
    runner, aside = AgentRunner(settings), [Role.AUX] * (name == "opencode")  # a title
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    last = call % (agent.tool, agent.argument, SUBMIT) if name == "mini" else "Done."
    replies = iter([call % (agent.tool, agent.argument, EDIT), last])
    async with opened(bytes_chat) as server:
        server.allowed = replace(server.allowed, max_input_length=400_000)
        server.max_tokens = 1_000_000
        server.say = lambda prompt: "A title" if "title generator" in prompt else next(replies)
        session = server.session()
        try:
            got = await runner.run(TASK, session.base_url, session.key, 0)
        finally:
            await runner.close()
    assert (got.reward, got.status) == (1.0, "ok"), got
    roles = roles_of(session.tree.calls)
    assert sorted(roles) == [*aside, Role.MAIN, Role.MAIN] and whole(server.steps) == server.prompts
    first, second = (call for call, role in zip(session.tree.calls, roles, strict=True) if role == Role.MAIN)
    assert second.parent is first
