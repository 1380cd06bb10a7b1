"""What can go wrong, and who has to act.

BatonError
├── UserError          wrong input: one clear line, exit code 2, no traceback
│   └── ConfigError    a configuration that cannot be right
├── JournalError       the disk or the journal on it; names file and position
├── Starved            a wait ran past its deadline; says who waited for what, since when
├── WeightsGone        the process that held new weights for its node died; they are asked for again
└── RunFailed          progress is impossible; the run ends with a reason, exit code 1

Bad *data* is none of these: it becomes a `service.types.Refusal`, a value with a reason.
A bug raises whatever Python raises (ValueError, AssertionError, ...), and nothing catches it.
"""


class BatonError(Exception):
    """The root of everything that Baton raises on purpose."""

    exit_code = 1


class UserError(BatonError):
    """The input is wrong; the message names what, where and what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that is malformed, or would deadlock or be wrong."""


class JournalError(BatonError):
    """The journal cannot be written or read; the message names file and position."""


class Starved(BatonError):
    """A wait ran past its deadline; the message says who waited for what, since when."""


class WeightsGone(BatonError):
    """The file that weights were to be read from is gone, with the process that held it; the next one will do."""


class RunFailed(BatonError):
    """The run cannot make progress; the message says why."""
