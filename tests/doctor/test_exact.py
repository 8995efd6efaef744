"""``jspec doctor --exact``: nothing differs of what is promised, and what does differ is counted and named."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from engines import TARGET, target
from tiny import smallest, tiny_checkpoint

from jspec.cli import main
from jspec.doctor import exact, exact_http, prove_exact
from jspec.doctor.exact import Way, Written, compared, ways
from jspec.llm import LLM
from jspec.models import products
from jspec.pallas.matmul import table

PROMPTS = ([5, 9, 2, 7] * 12, [3, 1, 4])


def test_texts_and_bits_are_counted_as_far_as_texts_are_the_same():
    expected = [Written([1, 2, 3], [-1.0, -2.0, -3.0]), Written([4, 5], [-1.0, -1.0])]
    other = float(np.nextafter(np.float32(-2.0), np.float32(0)))  # 24 bits further: 0xBFFFFFFF is 0xC0000000 less one
    found = [Written([1, 2, 7], [-1.0, other, -9.0]), Written([4, 5], [-1.0, -1.0])]
    one = compared(Way("another", True), expected, found)
    assert (one.texts, one.of_texts, one.numbers, one.of_numbers) == (1, 2, 1, 4)
    bits = np.array([-2.0, other], np.float32).view(np.uint32)
    assert one.bits == int(bits[0] ^ bits[1]).bit_count()
    assert not one.none
    greedy = compared(dataclasses.replace(Way("greedy", True), greedy=True), expected[::-1], found[::-1])
    assert greedy.none
    assert greedy.of_texts == 1


def test_a_promise_that_is_kept_and_what_is_not_promised(tmp_path, capsys):
    folder = smallest(tmp_path / "target")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab ab ab ab\nc\n")
    assert main(["doctor", "--exact", "--target", str(folder), "--prompts", str(prompts), "--max-tokens", "3"]) == 0
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"exact: 0 of 24 texts and 0 bits of \d+ log-probabilities differ", last)


def test_noise_of_the_place_in_a_batch_is_found(tmp_path, monkeypatch):
    """The fault: a request's noise depends on its place among those that are given together."""
    folder, completions = tiny_checkpoint(tmp_path / "target"), LLM.completions

    def by_place(self, prompts, params, keys):
        return completions(self, prompts, params, [key + np.uint32(i) for i, key in enumerate(keys)])

    monkeypatch.setattr(LLM, "completions", by_place)
    monkeypatch.setattr(exact, "ways", lambda *args: [way for way in ways(*args) if way.promised and not way.again][:2])
    found = prove_exact(str(folder), prompts=PROMPTS, max_tokens=6, chat=False)
    again, together, score = found.differences
    assert again.none
    assert together.texts > 0
    assert not found.exact
    assert found.kernel is not None
    assert score.of_texts == 0


def test_the_first_product_that_depends_on_the_number_of_tokens_is_named(monkeypatch):
    assert "no product" in products.first_difference(target(), (2, 8))
    plain = table.xla_matmul

    def split(product):
        y = plain(product)
        tokens = np.prod(product.x.shape[:-1])
        return (
            y * jnp.asarray(1 + 2.0**-20, y.dtype)
            if tokens == 8 and product.weight.shape[0] == TARGET.hidden_size
            else y
        )

    rows = tuple(dataclasses.replace(row, compute=split) if row.name == "XLA" else row for row in table.TABLE)
    monkeypatch.setattr(table, "TABLE", rows)
    monkeypatch.setattr(products, "TABLE", rows)
    said = products.first_difference(target(), (2, 4, 8))
    assert said.startswith("layers.0.attention.out ")
    assert '2, 4 tokens by "XLA" and 8 tokens by "XLA"' in said


def test_scores_of_targets_with_recurrent_states_are_promised(tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path / "target", "Qwen3_5ForCausalLM")
    monkeypatch.setattr(exact, "ways", lambda *args: [])
    (score,) = prove_exact(str(folder), prompts=PROMPTS, max_tokens=6, chat=False).differences
    assert score.promised
    assert score.none
    assert score.of_numbers > 12  # of texts of which some may end early


@pytest.mark.parametrize("option", ["--reference", "--output", "--draft-reference"])
def test_other_questions_are_refused_beside_it(option, tmp_path, capsys):
    assert main(["doctor", "--exact", "--target", str(tmp_path), option, "x"]) == 2
    assert f"{option.removeprefix('--').replace('-', '_')}='x' has no place beside --exact" in capsys.readouterr().err


def test_ways_with_drafts(tmp_path, monkeypatch):
    """Drafts by ``match`` with coupled noise give the plain texts, seeds included; by ``rejection`` the greedy ones."""
    chosen = [
        way.name
        for way in ways(2, True, exact.engine_config(TARGET, [[1]], 4, "float32"))
        if way.speculation != exact.PLAIN
    ]
    assert chosen == ["1 draft, match, coupled", "2 drafts, match, coupled", "2 drafts, rejection"]
    folder = tiny_checkpoint(tmp_path / "target")
    monkeypatch.setattr(exact, "ways", lambda *args: [way for way in ways(*args) if way.name in chosen[1:]])
    found = prove_exact(str(folder), str(folder), PROMPTS, num_draft_tokens=2, max_tokens=6, chat=False)
    coupled, rejection, _ = found.differences
    assert (coupled.texts, coupled.of_texts) == (0, 4)
    assert (rejection.texts, rejection.of_texts) == (0, 2)


class OneServer:
    """A server that completes any prompt with three tokens; of the n-th request, ``change(n)`` is added to numbers."""

    def __init__(self, change=lambda n: 0.0):
        self.bodies, self.change = [], change

    def answer(self, path: str, body: dict | None) -> dict:
        if body is None:
            return {"data": [{"id": "one"}]}
        self.bodies.append(body)
        tokens, numbers = ["a", "b", "c"], [-1.0, -2.0 + self.change(len(self.bodies)), -3.5]
        if body.get("echo"):
            assert body["max_tokens"] == 0
            tokens, numbers = ["p", *tokens], [None, *numbers]
        return {"choices": [{"text": "".join(tokens), "logprobs": {"tokens": tokens, "token_logprobs": numbers}}]}


def proved(monkeypatch, server: OneServer, *more: str) -> int:
    monkeypatch.setattr(exact_http._Server, "_ask", lambda self, path, body=None: server.answer(path, body))
    return main(["doctor", "--exact", "--url", "http://host:1/v1", *more])


def test_a_server_is_asked_in_all_ways(monkeypatch, capsys):
    server = OneServer()
    assert proved(monkeypatch, server) == 0
    *_, scores, last = capsys.readouterr().out.strip().splitlines()
    assert last == "exact: 0 of 24 texts and 0 bits of 72 log-probabilities differ"
    assert scores == "not promised: 0 of 0 texts and 0 bits of 24 log-probabilities differ"
    assert len(server.bodies) == 5 * 8
    assert [body["temperature"] for body in server.bodies[:8]] == [0.0] * 4 + [1.0] * 4
    assert all(body["model"] == "one" for body in server.bodies)


@pytest.mark.parametrize(("first", "numbers", "code"), [(9, 24, 1), (33, 0, 0)], ids=["by load", "by scores"])
def test_a_server_whose_numbers_differ_is_found(first, numbers, code, monkeypatch, capsys):
    assert proved(monkeypatch, OneServer(lambda n: 2.0**-20 if n >= first else 0.0)) == code
    out, said = capsys.readouterr()
    assert ("--reproducible" in said) == (code == 1)
    assert len(re.findall(r" 8 of 24 ", out)) == numbers // 8 + 1  # of three ways, and of scores
    assert (" 0 bits of 72 " in out) == (code == 0)


def test_what_is_no_server_is_said(monkeypatch, capsys):
    assert main(["doctor", "--exact", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server of OpenAI's protocol answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert "url='http://127.0.0.1:9': expected --exact beside it" in capsys.readouterr().err
    assert main(["doctor", "--exact"]) == 2
    assert "target=None: expected --target" in capsys.readouterr().err
    assert main(["doctor", "--exact", "--url", "x", "--draft", "y"]) == 2
    assert "draft='y' has no place beside --url" in capsys.readouterr().err
    assert main(["doctor", "--exact", "--url", "localhost:8000"]) == 2
    said = "url='localhost:8000': expected the address of a server, such as http://localhost:8000"
    assert said in capsys.readouterr().err
