"""Every exception of this package, and where failures are attributed.

    RolloutError
    ├── SetupError (ValueError)      infra: arguments, server flags or trainer settings that cannot work together
    ├── ServerError                  infra: the server is gone, or breaks its protocol
    │   ├── ServerGoneError          infra: it cannot be reached, or says that it is not well
    │   └── RequestError             data: the server refused, or failed to answer, one request
    ├── SandboxError                 infra: model-written code cannot be confined here as it must be
    │   └── SessionError             data: one sandboxed session could not be opened, or was lost with its machine
    ├── WeightSyncError              infra: the server did not take the trainer's weights
    ├── TemplateError (ValueError)   data: the chat template cannot render this conversation exactly
    ├── PromptTooLongError           data: the prompt leaves no room in the server's context
    └── EnvError                     data: an environment raised, hung, or returned what it must not

Infra or data decides what follows (`is_data`). A data failure ends its own trajectory: the row is returned with mask 0
and `env_reward=None`, the others carry on. An infra failure is raised out of the rollout, and so is the first data
failure of a batch in which no trajectory survived. Nothing here retries.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RolloutError(Exception):
    """Base of all errors of this package."""


class SetupError(RolloutError, ValueError):
    """Arguments, server flags or trainer settings that cannot work together. Raised before training on them."""


class TemplateError(RolloutError, ValueError):
    """The tokenizer's chat template cannot render this conversation exactly, or hides part of it from the model."""


class ServerError(RolloutError):
    """The server cannot be reached, or does not keep to its protocol."""


class ServerGoneError(ServerError):
    """The server cannot be reached, or answers nothing and is not healthy. Another process of it may be well."""


class RequestError(ServerError):
    """The server refused one request, or failed to answer it within its attempts. Others may well succeed."""

    status: int | None = None
    """The HTTP status it answered; None if it did not."""


class SandboxError(RolloutError):
    """Model-written code cannot be run here, or not be confined as it must be."""


class SessionError(SandboxError):
    """One session could not be opened, or was lost with the machine it ran on. Others may well go on."""


class WeightSyncError(RolloutError):
    """The server did not take the trainer's weights, so what it samples would be off-policy."""


class PromptTooLongError(RolloutError):
    """The prompt leaves no room for a completion in the server's context."""


class EnvError(RolloutError):
    """An environment's reset, step or close raised, or returned something else than it must."""


def is_data(error: Exception) -> bool:
    """Whether `error` concerns one trajectory rather than the run."""
    # An assertion is a bug, not a bad rollout.
    ours = SetupError | ServerError | SandboxError | WeightSyncError | AssertionError
    return isinstance(error, RequestError | SessionError) or not isinstance(error, ours)


@contextmanager
def boundary(error: type[RolloutError], what: str) -> Iterator[None]:
    """Turn whatever escapes the block into `error`, naming `what` and chaining the cause.

    Errors of this package pass through: they have been attributed where they arose.
    """
    try:
        yield
    except RolloutError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
