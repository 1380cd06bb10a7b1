"""Settings of a command that is run as an agent; each trajectory has its own process tree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import Named, NotNegative, Seconds, Section, UserPath

AGENT = "agent"
"""The `env.name` with which each trajectory is a run of `env.command`."""

PLACEHOLDERS = ("prompt", "prompt_file", "folder", "base_url", "seed")
"""What stands between braces in `env.command` and `env.variables`, and is replaced for each trajectory."""

OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables that lead an agent to its session."""


Limit = Annotated[int, Field(gt=0, le=1 << 62)]
"""The operating system takes no larger one."""


class CommandLimits(Section):
    """Limits of one run of a command; a run that exceeds one is ended with all its processes."""

    seconds: Seconds = 1800.0
    """Seconds from the command's start; what it did until then is scored."""
    score_seconds: Seconds = 300.0
    """Seconds in which the score must be there."""
    memory_bytes: Limit = 16 << 30
    """Resident memory of all processes together, shared memory and files in /dev/shm included."""
    processes: Limit = 512
    """Processes and threads at once."""
    output_bytes: Limit = 64 << 20
    """Bytes of stdout and stderr together."""
    file_bytes: Limit = 1 << 30
    """Bytes of one file that is written."""
    folder_bytes: Limit = 4 << 30
    """Bytes on disk of the trajectory's folder, at least 4096 for each file."""
    transcript_characters: NotNegative = 1 << 16
    """Characters of the output that are kept; of a longer one the middle is left out."""


TEMPLATE = "give a folder of which each trajectory gets a copy, or null"


class CommandConfig(Section):
    """A command that is run as an agent."""

    command: tuple[str, ...] = ()
    """With `name: agent`: the program and its arguments. {prompt}, {prompt_file}, {folder}, {base_url} and {seed} are
    replaced; without {prompt} and {prompt_file} the prompt is its input."""
    workdir: Annotated[UserPath, Named("template", "folder", TEMPLATE)] | None = None
    """Folder of which the command gets a copy as its current folder and home; None: an empty folder."""
    score: str | tuple[str, ...] | None = None
    """What scores a trajectory: `module:function` of a trusted module, or a command and its arguments; None: the agent
    posts its reward."""
    variables: dict[str, str] = {}
    """Further environment variables of the command; of Baton's own it gets PATH only."""
    network: Literal["endpoint", "open"] = "endpoint"
    """What the command reaches: only its endpoint, where the machine allows namespaces, or whatever Baton reaches."""
    limits: CommandLimits = CommandLimits()
