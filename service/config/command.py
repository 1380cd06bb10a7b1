"""Settings of a command that is run as an agent; each trajectory has its own process tree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.config.section import Named, NotNegative, Seconds, Section, UserPath

AGENT = "agent"
"""The value of `env.name` with which each trajectory is a run of `env.command`."""

PLACEHOLDERS = ("prompt", "prompt_file", "folder", "base_url", "seed")
"""Names that are replaced for each trajectory where they appear in braces in `env.command` and `env.variables`."""

OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
"""Environment variables with the address and the key of an agent's session, which Baton sets."""


Limit = Annotated[int, Field(gt=0, le=1 << 62)]
"""A limit that the operating system accepts."""


class CommandLimits(Section):
    """Limits of one run of a command; a run that exceeds a limit is ended with all its processes."""

    seconds: Seconds = 1800.0
    """Maximum seconds of a command's run; what the command did until then is scored."""
    score_seconds: Seconds = 300.0
    """Seconds within which the trajectory must be scored."""
    memory_bytes: Limit = 16 << 30
    """Maximum resident memory, in bytes, of all processes together, shared memory and files in /dev/shm included."""
    processes: Limit = 512
    """Maximum number of processes and threads at once."""
    output_bytes: Limit = 64 << 20
    """Maximum bytes of stdout and stderr together."""
    file_bytes: Limit = 1 << 30
    """Maximum bytes of one file that is written."""
    folder_bytes: Limit = 4 << 30
    """Maximum bytes on disk of the trajectory's folder; each file counts as at least 4096."""
    transcript_characters: NotNegative = 1 << 16
    """Maximum characters of the output that are kept; the middle of a longer output is left out."""


TEMPLATE = "give a folder of which each trajectory gets a copy, or null"


class CommandConfig(Section):
    """A command that is run as an agent."""

    command: tuple[str, ...] = ()
    """With `name: agent`: the program and its arguments. {prompt}, {prompt_file}, {folder}, {base_url} and {seed} are
    replaced; if neither {prompt} nor {prompt_file} occurs, the prompt is the program's standard input."""
    workdir: Annotated[UserPath, Named("template", "folder", TEMPLATE)] | None = None
    """Folder that is copied for each command, as its current folder and home; None: an empty folder."""
    score: str | tuple[str, ...] | None = None
    """How a trajectory is scored: by `module:function` of a trusted module, or by a command, given with its arguments;
    None: the agent posts its reward to the endpoint."""
    variables: dict[str, str] = {}
    """Further environment variables of the command, which inherits only PATH from Baton."""
    network: Literal["endpoint", "open"] = "endpoint"
    """Network access of the command: `endpoint`, only the endpoint, if the machine allows network namespaces; `open`,
    the same as Baton's."""
    limits: CommandLimits = CommandLimits()
