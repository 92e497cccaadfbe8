"""The errors a user can meet, each with what happened, where, and what to do. Imports nothing.

LayeringError                exit status 1
├── UsageError               2  a request that makes no sense as written: sizes, names, options
│   ├── ConfigError          2  a YAML deployment, with file, line and field
│   └── InputError           2  feeds that do not fit the model's inputs
├── ModelError               1  the ONNX file cannot be read, cut or prepared
├── BuildError               1  the build failed or its check found a wrong answer; nothing was published
│   └── DiskError            1  the disk is full, or does not let a file be written
├── BudgetError              3  the budget is under the floor; carries the floor and its parts
├── StoreError               4  a built chain cannot be used as it is
│   ├── NotBuiltError        4  there is no finished chain of that name
│   ├── CorruptError         4  bytes are missing, changed or point outside their folder
│   └── ForeignError         4  built by another version or for another machine
├── BackendError             1  the inference engine refused or failed
├── ReadError                1  the drive failed while weights were being read
├── MemoryLimitError         1  the machine could not give the memory the schedule needs
├── ClosedError              1  the chain was closed while or before it was used
└── ServiceError             1  a deployment does not serve this request
    ├── QueueFullError       1  as many requests wait for the model as may
    ├── UnavailableError     1  the model is not loaded, or cannot be served; says why
    ├── UnknownModelError    1  there is no model of that name
    └── TimedOutError        1  the request's time was over before it had its answer
"""

from __future__ import annotations


class LayeringError(Exception):
    """Base of every error raised on purpose.

    `what` says what went wrong, `where` names the file, field, block or tensor, `remedy` says what to do about it.
    `str(error)` is the three on one line each; empty parts are left out.
    """

    exit_status = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(what, where, remedy)

    def __reduce__(self) -> tuple[object, ...]:
        """So that an error reaches another process as it is."""
        return _again, (type(self), self.args), self.__dict__

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.remedy:
            lines.append(f"  to do: {self.remedy}")
        return "\n".join(lines)


def _again(kind: type[LayeringError], args: tuple[object, ...]) -> LayeringError:
    error = kind.__new__(kind)
    error.args = args
    return error


class UsageError(LayeringError):
    exit_status = 2


class ConfigError(UsageError):
    pass


class InputError(UsageError):
    pass


class ModelError(LayeringError):
    pass


class BuildError(LayeringError):
    pass


class DiskError(BuildError):
    pass


class BudgetError(LayeringError):
    """Raised before any work when a budget is under the floor; `floor` and `parts` are in bytes."""

    exit_status = 3

    def __init__(self, what: str, *, floor: int, parts: dict[str, int], where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.floor = floor
        self.parts = parts


class StoreError(LayeringError):
    exit_status = 4


class NotBuiltError(StoreError):
    pass


class CorruptError(StoreError):
    pass


class ForeignError(StoreError):
    pass


class BackendError(LayeringError):
    pass


class ReadError(LayeringError):
    pass


class MemoryLimitError(LayeringError):
    pass


class ClosedError(LayeringError):
    pass


class ServiceError(LayeringError):
    pass


class QueueFullError(ServiceError):
    pass


class UnavailableError(ServiceError):
    pass


class UnknownModelError(ServiceError):
    pass


class TimedOutError(ServiceError):
    pass
