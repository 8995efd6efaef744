"""The consent to a download: the sizes in words, a question where somebody can answer it, and the room on the disk."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jspec.checkpoints.files.refusal import Refusal
from jspec.hub.transfer import Plan

YES = ("y", "yes")
RESERVE = 2**28  # bytes of the disk that a download leaves free


def shown(size: int) -> str:
    """A size in words, ``16.1 GB``: in powers of a thousand, as the hub's pages have it."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def summary(plan: Plan) -> str:
    """What a plan fetches, in one line: repository, commit, size, and how much of it is here already."""
    here = plan.size - plan.missing
    have = f", of which {shown(here)} are here already" if here else ""
    repository = plan.listing.repository
    return f"{repository} (commit {plan.listing.commit[:8]}): {len(plan.files)} files, {shown(plan.size)}{have}"


def somebody_answers() -> bool:
    """Whether a question can be asked: standard input and standard error are terminals."""
    streams = (sys.stdin, sys.stderr)
    return all(stream is not None and not stream.closed and stream.isatty() for stream in streams)


def ask(plans: Sequence[Plan]) -> bool:
    """Ask once whether all of ``plans`` may be downloaded; whatever is no yes is a no."""
    from huggingface_hub import constants

    for plan in plans:
        print(summary(plan), file=sys.stderr)
    missing = shown(sum(plan.missing for plan in plans))
    print(f"Download {missing} from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in YES


def require_room(plans: Sequence[Plan]):
    """Check that the disk of the local cache has room for all of ``plans``.

    Raises:
      Refusal: it has not; the message has both numbers.
    """
    from huggingface_hub import constants

    needed = sum(plan.missing for plan in plans)
    place = Path(constants.HF_HUB_CACHE).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed and needed + RESERVE > free:
        names = " and ".join(str(plan.listing.repository) for plan in plans)
        raise Refusal(
            f"{names}: {shown(needed)} are to be downloaded to {constants.HF_HUB_CACHE}, whose disk has {shown(free)} "
            f"free, of which {shown(RESERVE)} stay so; make room, or name a folder on another disk in HF_HOME"
        )
