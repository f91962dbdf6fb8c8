"""One error tree. The type says whose fault it is; rpc.convert maps it to a gRPC status, the CLI to an exit code.

A message says what, the value, the limit and what to do next. Messages to callers carry no path, no host name and
no text of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RETRY_AFTER_MS: Final = 1000
"""The hint where nothing better is known."""


class ResidentError(Exception):
    """Base of everything residentd raises on purpose."""


class CallerError(ResidentError):
    """The request is wrong, and would be wrong again: INVALID_ARGUMENT."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NotFoundError(CallerError):
    """The named model, version or request does not exist: NOT_FOUND."""


class OverloadedError(ResidentError):
    """The request is right, and there is no room now: RESOURCE_EXHAUSTED with a retry hint."""

    def __init__(self, message: str, *, retry_after_ms: int = RETRY_AFTER_MS) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class UnavailableError(ResidentError):
    """The model is loading, draining or between two workers: UNAVAILABLE, retry later."""

    def __init__(self, message: str, *, retry_after_ms: int = RETRY_AFTER_MS) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineError(ResidentError):
    """The caller's deadline passed: DEADLINE_EXCEEDED."""


class EngineFailedError(ResidentError):
    """The engine could not finish this request, however often it was tried: INTERNAL."""


class OperatorError(ResidentError):
    """Configuration, source directory or command is wrong: FAILED_PRECONDITION."""


class LoadError(OperatorError):
    """A version does not come up: what is wrong with it stays wrong until it is reinstalled or the machine changes."""


class ConfigError(OperatorError):
    """The configuration is refused as a whole."""


class ConflictError(OperatorError):
    """The target already exists or is busy: ALREADY_EXISTS."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that keeps a source from being installed: what, where, and the way out."""

    what: str
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.remedy}"


class SourceError(OperatorError):
    """The source cannot be installed. Carries every finding, not the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = tuple(findings)


class AccuracyError(OperatorError):
    """The lowered engine does not reproduce the export within the stated bound."""


class MachineError(ResidentError):
    """The machine lacks memory, disk or a library: RESOURCE_EXHAUSTED or FAILED_PRECONDITION by the operator's view."""


class StoreError(MachineError):
    """Files of the store are damaged or cannot be written."""


class BackendLostError(MachineError):
    """The runtime under this worker is unusable: the worker ends, the daemon starts another."""


class StepRetryableError(MachineError):
    """This step failed and wrote nothing visible: abort it and plan again."""


class LinkError(ResidentError):
    """A frame on the worker link is malformed, too large or out of order. Always our own fault."""
