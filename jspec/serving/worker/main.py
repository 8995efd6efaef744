"""Main program of a worker: joins the group, loads the model, and serves requests (leader) or follows the leader."""

import argparse
import os
import signal
import sys
import traceback

from jspec._validation import MISTAKES
from jspec.commands.xla_alarms import without_alarms
from jspec.serving.http.server import SIGNALS
from jspec.serving.supervisor.messages import Failed, Joined, Ready
from jspec.serving.worker.link import Link

LOST = 4  # exit code of a worker after another one was lost


def main(descriptor: str) -> int:
    """Run the supervisor's task; returns the exit code if the group ended in order.

    After an error the process exits here at once, because JAX would wait for lost workers.

    Args:
      descriptor: file descriptor of the connection to the supervisor.
    """
    link = Link(int(descriptor))
    for number in SIGNALS:  # the supervisor gets them as well, from a terminal or SLURM, and ends this process
        signal.signal(number, signal.SIG_IGN)
    try:
        _run(link)
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
    """Send the supervisor the reason, and exit at once."""
    link.send(Failed(why[:10_000]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(link: Link):
    args = argparse.Namespace(**link.task.options)
    from jspec.serving.http.settings import log_to_stderr, settings_of

    settings = settings_of(args)
    log_to_stderr(settings)
    from jspec.serving.server.served_model import load_service

    load = load_service(args, settings)
    import jax

    from jspec.engine.multihost import leader

    jax.distributed.initialize(**link.task.group)
    rank = jax.process_index()
    link.send(Joined(rank, jax.process_count()))
    leader.when_lost(lambda why: end_at_once(link, why))
    if rank:
        from jspec.commands.model_args import chosen_model

        with without_alarms():
            chosen_model(args).load().follow(lambda: link.send(Ready()))
        return
    from jspec.serving.http.server import listener
    from jspec.serving.worker.private_server import run_privately

    with listener(link.task.host, 0) as bound:
        service = load()
        service.llm.engine.runner.serving()
        run_privately(service, bound, link, settings)
