"""Settings of a command that is run as an agent; each trajectory has its own process tree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import Named, NotNegative, Seconds, Section, UserPath

AGENT = "agent"
"""The value of `env.name` with which the command `env.command` plays each trajectory."""

PLACEHOLDERS = ("prompt", "prompt_file", "folder", "base_url", "seed")
"""Names that have a value for each trajectory; `{name}` in `env.command` and `env.variables` is replaced by the
value."""

OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables that Baton sets to the address and the key of an agent's session."""


Limit = Annotated[int, Field(gt=0, le=1 << 62)]
"""A limit on a resource, in the range that the operating system accepts."""


class CommandLimits(Section):
    """Limits of one run of a command. If a run exceeds a limit, all its processes are killed."""

    seconds: Seconds = 1800.0
    """Maximum seconds of a command's run. After that, the result so far is scored."""
    score_seconds: Seconds = 300.0
    """Seconds within which the trajectory must be scored."""
    memory_bytes: Limit = 16 << 30
    """Maximum resident memory of all processes together, in bytes, including shared memory and files in /dev/shm."""
    processes: Limit = 512
    """Maximum number of processes and threads at the same time."""
    output_bytes: Limit = 64 << 20
    """Maximum bytes of stdout and stderr together."""
    file_bytes: Limit = 1 << 30
    """Maximum bytes of one file that the command writes."""
    folder_bytes: Limit = 4 << 30
    """Maximum bytes of the trajectory's folder on disk; each file counts as at least 4096 bytes."""
    transcript_characters: NotNegative = 1 << 16
    """Maximum characters of the output that are kept; of a longer output, the middle is left out."""


TEMPLATE = "give a folder of which each trajectory gets a copy, or null"


class CommandConfig(Section):
    """A command that is run as an agent."""

    command: tuple[str, ...] = ()
    """With `name: agent`: the program and its arguments. {prompt}, {prompt_file}, {folder}, {base_url} and {seed} are
    replaced by their values. If neither {prompt} nor {prompt_file} occurs, the prompt is the program's standard
    input."""
    workdir: Annotated[UserPath, Named("template", "folder", TEMPLATE)] | None = None
    """Folder that is copied for each run of the command; the copy is the command's current folder and home. None: an
    empty folder."""
    score: str | tuple[str, ...] | None = None
    """What scores a trajectory: a function of a trusted module, as `module:function`, or a command, as a list of the
    program and its arguments. None: the agent sends its reward to the endpoint."""
    variables: dict[str, str] = {}
    """Further environment variables of the command. Of Baton's own variables, the command gets only PATH."""
    network: Literal["endpoint", "open"] = "endpoint"
    """Network access of the command. `endpoint`: only the endpoint for agents, if the machine allows network
    namespaces; `open`: the same access as Baton."""
    limits: CommandLimits = CommandLimits()
