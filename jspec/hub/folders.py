"""``local_checkpoints``: from what a user gave, folders and names on the hub, to folders and GGUF files."""

import os
import sys
from collections.abc import Sequence

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.names import is_gguf, tags_of
from jspec.hub.cache import Snapshot, names_in, snapshot_of
from jspec.hub.consent import ask, require_room, shown, somebody_answers, summary
from jspec.hub.errors import Unreachable
from jspec.hub.listing import ask_hub
from jspec.hub.names import Repository, is_hub_name, repository_of
from jspec.hub.transfer import Plan, download

BRIEFLY = 3.0  # seconds to wait for a size that only goes into a message


def local_checkpoints(given: Sequence[str], consent: bool | None = None, allow_pickle: bool = False) -> list[str]:
    """The folder or GGUF file of each checkpoint: what was given, if that exists, or a snapshot in the hub's local cache.

    Args:
      given: folders and files, or names as ``org/name``, ``org/name@revision`` and ``org/name:Q4_K_M``.
      consent: True downloads what the hub has now and the local cache lacks. False takes the local cache alone. None asks
        once for all, if there is something to download and a terminal to ask at, and takes the local cache otherwise.
      allow_pickle: whether pickled weights are of use, where a repository has no others.

    Raises:
      Refusal: a name is neither, or something would have to be downloaded without consent; the message has the size if the
        hub says it.
    """
    folders: dict[str, str] = {text: text for text in given if os.path.exists(text)}
    plans: dict[str, Plan] = {}
    for text, (repository, snapshot) in {text: _found(text) for text in given if text not in folders}.items():
        cached = snapshot if snapshot is not None and snapshot.missing is None else None
        if cached is not None and consent is not True:
            folders[text] = str(cached.place)
            continue
        if consent is False or (consent is None and not somebody_answers()):
            raise _absent(text, repository, snapshot, allow_pickle)
        try:
            plans[text] = Plan.of(ask_hub(repository), allow_pickle)
        except Unreachable as reason:
            if cached is None:
                raise
            print(f"{reason}; the local cache's commit {cached.folder.name[:8]} is used", file=sys.stderr)
            folders[text] = str(cached.place)
    if plans:
        _consent(list(plans.values()), consent)
    folders |= {text: str(download(plan)) for text, plan in plans.items()}
    return [folders[text] for text in given]


def _found(text: str) -> tuple[Repository, Snapshot | None]:
    """The repository that a name means, and what the local cache has of it."""
    repository = repository_of(text)
    snapshot = None if repository is None else snapshot_of(repository)
    if repository is None or (snapshot is None and not is_hub_name(text)):
        raise Refusal(
            f"{_is_no(text)}, and the local hub cache has no such model: expected a checkpoint folder, or the name "
            "of a model on the Hugging Face hub, org/name or org/name@revision, of its GGUF files with :Q4_K_M behind it"
        )
    return repository, snapshot


def _is_no(text: str) -> str:
    return f"{text!r} is no {'file' if is_gguf(text) else 'folder'}"


def _consent(plans: list[Plan], consent: bool | None):
    """Say what will be downloaded, or ask.

    Raises:
      Refusal: the answer was no, or the disk has no room.
    """
    fetched = [plan for plan in plans if plan.missing]
    require_room(fetched)
    if consent:
        for plan in fetched:
            print(f"downloading {summary(plan)}", file=sys.stderr, flush=True)
    elif fetched and not ask(fetched):
        names = " and ".join(str(plan.listing.repository) for plan in fetched)
        raise Refusal(f"{names}: not downloaded, as you wished; give a checkpoint folder, or answer y")


def _absent(text: str, repository: Repository, snapshot: Snapshot | None, allow_pickle: bool) -> Refusal:
    """The error where a download needs a consent that nobody gave, with its size if the hub says it."""
    state = "no such model" if snapshot is None else f"it without {snapshot.missing}, because a download ended early"
    if snapshot is not None and snapshot.gguf is None and (tags := tags_of(names_in(snapshot.folder))):
        state = f"{' and '.join(f'{repository}:{tag}' for tag in tags)} alone"
    text = _is_no(text)
    try:
        size = f" ({shown(Plan.of(ask_hub(repository, BRIEFLY), allow_pickle).missing)})"
    except Unreachable:
        size = ""
    except Refusal as reason:
        return Refusal(f"{text}, the local hub cache has {state}, and {reason}")
    return Refusal(
        f"{text}, and the local hub cache has {state}: expected a checkpoint folder, or --download "
        f"(download=True), which fetches it from the hub{size}"
    )
