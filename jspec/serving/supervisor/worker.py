"""The process of a member: it joins the group, loads, and serves its keeper or follows process 0."""

import argparse
import os
import signal
import sys
import traceback

from jspec._validation import MISTAKES
from jspec.serving.openai.http_server import SIGNALS
from jspec.serving.supervisor.link import Link
from jspec.serving.supervisor.messages import Failed, Joined, Ready

LOST = 4  # exit code of a member that has lost another one


def main(descriptor: str) -> int:
    """Do the task of a keeper; returns the exit code if the group ended in order.

    Otherwise the process ends here and at once, since JAX would wait for the members that were lost.

    Args:
      descriptor: of the connection to the keeper.
    """
    link = Link(int(descriptor))
    for number in SIGNALS:  # a terminal or SLURM sends them to the keeper as well, which decides what becomes of this
        signal.signal(number, signal.SIG_IGN)
    try:
        _take_part(link)
    except MISTAKES as error:
        end_at_once(link, str(error), 2)
    except BaseException as error:
        from jspec.engine.multihost.leader import ProcessLost

        if isinstance(error, ProcessLost):
            end_at_once(link, str(error), LOST)
        traceback.print_exc()
        end_at_once(link, f"{type(error).__name__}: {error}", 1)
    return 0


def end_at_once(link: Link, why: str, code: int = LOST):
    """Tell the keeper why, and end the process."""
    link.say(Failed(why[:10_000]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _take_part(link: Link):
    args = argparse.Namespace(**link.task.options)
    from jspec.serving.openai.server_settings import log_to_stderr, settings_of

    settings = settings_of(args)
    log_to_stderr(settings)
    from jspec.serving.openai.served_model import load_service

    load = load_service(args, settings)
    import jax

    from jspec.engine.multihost import leader

    jax.distributed.initialize(**link.task.group)
    rank = jax.process_index()
    link.say(Joined(rank, jax.process_count()))
    leader.when_lost(lambda why: end_at_once(link, why))
    if rank:
        from jspec.commands.model_args import chosen_model

        chosen_model(args).load().follow(lambda: link.say(Ready()))
        return
    from jspec.serving.openai.http_server import listener
    from jspec.serving.openai.lifecycle import run_privately

    with listener(link.task.host, 0) as bound:
        service = load()
        service.llm.engine.runner.serving()
        run_privately(*(service, bound, link), shutdown_timeout=settings.shutdown_timeout, log_level=settings.log_level)
