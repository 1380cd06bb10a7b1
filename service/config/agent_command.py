"""Settings of a command that is run as an agent; each trajectory has its own process tree."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.config.section import Named, Seconds, Section, UserPath

AGENT = "agent"
"""The value of `env.name` with which the command `env.command` plays each trajectory."""

PLACEHOLDERS = ("prompt", "prompt_file", "folder", "base_url", "seed")
"""Names that have a value for each trajectory; `{name}` in `env.command` and `env.variables` is replaced by the
value."""

OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables that Baton sets to the address and the key of an agent's session."""


Limit = Annotated[int, Field(ge=1024, le=1 << 62)]
"""A limit on a resource, in the range that the operating system accepts."""


class CommandLimits(Section):
    """Limits of one run of a command. They contain mistakes; see SECURITY.md for walls."""

    seconds: Seconds = 1800.0
    """Seconds of a command's run. Then its processes are killed, and the result so far is scored."""
    score_seconds: Seconds = 300.0
    """Seconds within which the trajectory must be scored."""
    memory_bytes: Limit = 16 << 30
    """Private memory that one process of the command may write (RLIMIT_DATA)."""
    file_bytes: Limit = 1 << 30
    """Bytes of one file that the command writes, also of its output (RLIMIT_FSIZE)."""


TEMPLATE = "give a folder of which each trajectory gets a copy, or null"


class CommandConfig(Section):
    """A command that is run as an agent."""

    command: tuple[str, ...] = ()
    """With `name: agent`: the program and its arguments, in which {prompt}, {prompt_file}, {folder}, {base_url} and
    {seed} are replaced. Without {prompt} and {prompt_file}, the prompt is the standard input."""
    workdir: Annotated[UserPath, Named("template", "folder", TEMPLATE)] | None = None
    """Folder that is copied for each run of the command, as its current folder and home. None: an empty folder."""
    score: str | tuple[str, ...] | None = None
    """What scores a trajectory: a function of a trusted module (`module:function`), or a command as a list. None: the
    agent sends its reward to the endpoint."""
    variables: dict[str, str] = {}
    """Environment variables of the command. Of Baton's own, it gets only PATH."""
    limits: CommandLimits = CommandLimits()
