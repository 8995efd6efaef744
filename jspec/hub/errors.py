"""Errors of the hub, in one sentence that names the repository and what the user does about it."""

import contextlib
from collections.abc import Iterator

from jspec.checkpoints.files.refusal import Refusal
from jspec.hub.names import Repository

MAX_REASON = 200  # characters of a message of the library or the hub


class Unreachable(Refusal):
    """The hub gave no answer, or none of use, so that what the local cache has is all there is."""


@contextlib.contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Raise a ``Refusal`` in place of what huggingface_hub raises within.

    Raises:
      Unreachable: there is no connection, ``HF_HUB_OFFLINE`` forbids one, or the hub fails.
      Refusal: the repository or the revision does not exist or is not for this user, or a transfer broke off.
    """
    try:
        yield
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # of requests, sockets, files and the library itself: it documents no common class
        raise _refusal(repository, error) from None


def _refusal(repository: Repository, error: Exception) -> Refusal:
    from huggingface_hub import constants, errors

    hub, name = constants.ENDPOINT, repository.name
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.is_offline_mode():
        return Unreachable(f"{repository}: HF_HUB_OFFLINE forbids to ask {hub}; unset it, or give a checkpoint folder")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return Refusal(
            f"{repository}: the repository is gated (HTTP {status}); accept its conditions at {hub}/{name}, then set "
            "HF_TOKEN to a token that may read it, or run hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return Refusal(
            f"{repository}: the repository has no revision {repository.revision!r} (any more); give another one behind @, "
            f"or {name} alone for its default branch"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return Refusal(
            f"{repository}: {hub} has no such model repository (HTTP {status}), or a private one; correct the name, or "
            "set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        where = error.filename or constants.HF_HUB_CACHE
        return Refusal(
            f"{repository}: cannot be written to {where} ({error.strerror}); correct that, or name another folder in HF_HOME"
        )
    reason = f"HTTP {status}" if status is not None else f"{type(error).__name__}: {_short(error)}"
    return Unreachable(
        f"{repository}: {hub} cannot be reached ({reason}); try again when it can, or give a checkpoint folder"
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())[:MAX_REASON]
    return "".join(letter if letter.isprintable() else "?" for letter in text)
