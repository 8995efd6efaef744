"""What an engine is put through to time one thing about it, once each time. Times are in seconds."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.engine.loads import Client, Load, Texts, longest_gap

PROMPT, LONG, AFTER = 512, 32_000, 64  # tokens of prompts, and new tokens of requests of which only the first count
ALONGSIDE, ALONGSIDE_NEW = 15, 2048  # requests that decode while a prompt is read, and their new tokens
WATCHED, WATCHED_ALL = 400, 500  # new tokens in which rounds are timed, and those that the request would get
BESIDE, ALL_BESIDE = (
    128,
    448,
)  # new tokens in which requests beside constrained ones are watched, and those they would get
AGENT_TURNS, AGENT_PROMPT, CALL, TOOL_RESULT = 10, 12_000, 160, 800  # an agent's session; the others are tokens
TURN, TURN_NEW, ANSWER = 2000, 50, 16  # tokens of a chat: its first turn, what the second adds, and new ones of either


class AnyToken:
    """A constraint that allows every token: what remains is what the engine does for a constrained request."""

    def jump_forward(self, most: int) -> list[int]:
        return []

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        pass

    def add(self, tokens: Sequence[int]) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Scenarios:
    """The scenarios; each leaves the engine idle.

    Attributes:
      texts: where prompts come from.
      divisor: of all lengths; 1 but for smoke runs.
    """

    texts: Texts
    divisor: int

    def load(self, prompt: int, new: int) -> Load:
        return Load(self.texts.prompt(prompt // self.divisor), new // self.divisor)

    def first_tokens(self, client: Client, count: int, length: int = PROMPT) -> float:
        """How long it takes until the host knows a token of each of ``count`` requests, which go on decoding."""
        loads = [self.load(length, AFTER) for _ in range(count)]
        started = time.perf_counter()
        client.until_first([client.add(load) for load in loads])
        ended = time.perf_counter()
        client.give_up()
        return ended - started

    def lone_round(self, client: Client) -> float:
        """How long a round of a request takes that is alone: from its first call on, until most of its text is there."""
        request = client.add(self.load(PROMPT, WATCHED_ALL))
        client.until_first([request])
        started, before = request.told[-1][0], request.rounds
        while request.tokens < WATCHED // self.divisor:
            client.step()
        ended, after = request.told[-1][0], request.rounds
        client.give_up()
        return (ended - started) / (after - before)

    def long_beside(self, client: Client, count: int) -> tuple[float, float]:
        """The longest gap between tokens of ``count`` requests while a long prompt is read, and how long that takes until
        its first token.

        Raises:
          RuntimeError: one of the requests ended meanwhile.
        """
        running = [client.add(self.load(PROMPT, ALONGSIDE_NEW)) for _ in range(count)]
        client.until_first(running)
        for _ in range(3):
            client.step()
        long = client.add(self.load(LONG, AFTER))
        client.until_first([long])
        if any(request.finished for request in running):
            raise RuntimeError(f"a request of {ALONGSIDE_NEW} new tokens ended while the long prompt was read")
        client.give_up()
        return longest_gap(running, long.arrived, long.told[0][0]), long.first

    def beside_constrained(self, client: Client, free: int, constrained: int) -> tuple[float, float]:
        """Tokens per second of ``free`` requests, and seconds of a round of ``constrained`` ones, while all of them decode;
        0 and NaN where there are none."""
        running = [client.add(self.load(PROMPT, ALL_BESIDE)) for _ in range(free)]
        held = [client.add(self.load(PROMPT, ALL_BESIDE), constraint=AnyToken()) for _ in range(constrained)]

        def told() -> tuple[int, int]:
            return sum(request.tokens for request in running), sum(request.rounds for request in held)

        client.until_first([*running, *held])
        (tokens, rounds), started = told(), time.perf_counter()
        # Rounds commit some three tokens each.
        until = (tokens + free * BESIDE // self.divisor, rounds + constrained * BESIDE // self.divisor // 4)
        while told()[0] < until[0] if free else told()[1] < until[1]:
            if any(one.finished for one in (*running, *held)):
                raise RuntimeError(f"a request of {ALL_BESIDE} new tokens ended before {BESIDE} of each were there")
            client.step()
        seconds, now = time.perf_counter() - started, told()
        client.give_up()
        made = (now[1] - rounds) / max(constrained, 1)
        return (now[0] - tokens) / seconds, seconds / made if made else float("nan")

    def turns(self, client: Client) -> tuple[float, float]:
        """How long the first token of each of two turns of a chat takes."""
        shared, new = self.load(TURN, ANSWER), self.load(TURN_NEW, ANSWER)
        first = client.add(shared)
        client.finish()
        second = client.add(Load([*shared.prompt, *new.prompt], new.new))
        client.finish()
        return first.first, second.first

    def session(self, client: Client) -> list[tuple[float, float]]:
        """An agent's session: for each turn, seconds to its first token, and the share of its prompt that was cached.

        A prompt is the one before with the answer to it, a call of a tool, and what the tool has said.
        """
        prompt, turns = self.load(AGENT_PROMPT, CALL).prompt, []
        for _ in range(AGENT_TURNS):
            turn = client.add(Load(prompt, CALL // self.divisor))
            client.finish()
            turns.append((turn.first, turn.cached / len(prompt)))
            prompt = [*prompt, *turn.text, *self.load(TOOL_RESULT, 1).prompt]
        return turns

    def repeated_queue(self, client: Client, count: int) -> tuple[float, float, bool]:
        """How long a queue of ``count`` requests takes, how long the device takes to do the same again when it never waits
        for the host, and whether it came to the same texts.

        The programs that the engine has sent are sent once more, with the same arguments and from an empty state, all of
        them at once. So the device computes the same texts by the same kernels, one program after the other.
        """
        runner, sent = client.engine.runner, []
        send = runner.batch.send

        def noted(program, *args):
            sent.append((program, args))
            return send(program, *args)

        loads = self.texts.queue(count, self.divisor)
        self._begin_anew(client)
        runner.batch.send = noted
        try:
            started = time.perf_counter()
            client.serve(loads)
            client.finish()
            served = time.perf_counter() - started
        finally:
            del runner.batch.send  # the method of its class is there again
        texts = np.asarray(runner.batch.state.tokens)
        self._begin_anew(client)
        started = time.perf_counter()
        for program, args in sent:
            runner.batch.send(program, *args)
        jax.block_until_ready(runner.batch.state.outcome)
        repeated = time.perf_counter() - started
        return served, repeated, bool(np.array_equal(texts, runner.batch.state.tokens))

    def _begin_anew(self, client: Client):
        """Have an empty state on the device, and no prefix known."""
        client.engine.scheduler.pages.forget_prefixes()
        runner = client.engine.runner
        del runner.batch.state  # its memory is needed
        runner.restore()
        jax.block_until_ready(runner.batch.state.outcome)
