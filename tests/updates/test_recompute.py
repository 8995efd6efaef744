"""Requests that are kept while weights are replaced, and then read their own texts again."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from disturbances import by_hand
from engines import drained, shared
from safetensors.numpy import load_file
from tiny import smallest

import jspec
from jspec.engine.scheduler.scheduler import Scheduler

MODELS = Path(jspec.__file__).parent / "demo_models"
SIZES: dict[str, Any] = {
    "max_batch": 3,
    "max_len": 128,
    "page_size": 8,
    "prefill_chunk": 8,
    "prefill_tokens": 32,
    "rounds": 2,
}
PROMPT = "def main(arguments):\n    return [int(one) for one in arguments if one]\n"


@shared
def demo(draft: str | None) -> Any:
    options: dict[str, Any] = {} if draft is None else {"num_draft_tokens": 3}
    where = draft if draft in (None, "ngram") else MODELS / draft
    return jspec.load(MODELS / "target", where, dtype="float32", **SIZES, **options)


def scaled(folder: Path, times: float = 1.25) -> dict[str, Any]:
    held = load_file(next(folder.glob("*.safetensors")))
    return {name: jnp.asarray(x) * times if x.ndim > 1 else jnp.asarray(x) for name, x in held.items()}


@pytest.fixture
def llm(request):
    """A model that is shared, with the weights of its folders again behind each test."""
    model = demo(getattr(request, "param", None))
    yield model
    model.restore()


def asked(**options) -> jspec.SamplingParams:
    return jspec.SamplingParams(**{"temperature": 0.8, "max_tokens": 50, "ignore_eos": True} | options)


def interrupted(llm: Any, prompt: Any, params: list[jspec.SamplingParams], steps: Any, change) -> list[jspec.Result]:
    """The results of requests that ``change`` is called in the midst of: behind so many steps, or the first behind which
    ``steps()`` holds."""
    results: list[Any] = []
    loop, pausing, stands = llm.engine.loop, llm.engine.lifecycle._pausing, threading.Event()
    usual, made = loop.step, iter(range(1, 1000))
    reached = steps if callable(steps) else lambda: next(made) == steps

    def step(**how):
        usual(**how)
        if not stands.is_set() and reached():
            pausing.pause("keep", None)
            stands.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step", step)
        thread = threading.Thread(target=lambda: results.extend(llm.generate([prompt] * len(params), params)))
        thread.start()
        assert stands.wait(60)
        change()
        llm.resume()
        thread.join()
    return results


def assert_goes_on_as_fresh(llm: Any, result: jspec.Result, params: jspec.SamplingParams):
    """That the tokens of the newest weights are those that they give behind the text before."""
    *_, (version, behind) = result.weights_versions
    assert version == llm.engine.loop.weights_version
    llm.reset_prefix_cache()
    text, left = [*result.prompt_token_ids, *result.token_ids[:behind]], len(result.token_ids) - behind
    rest = llm.generate([text], dataclasses.replace(params, max_tokens=left))[0]
    assert rest.token_ids == result.token_ids[behind:]


@pytest.mark.parametrize("llm", [None, "ngram", "draft", "eagle3"], indirect=True)
def test_texts_go_on_as_those_of_a_fresh_engine(llm):
    """Whatever the seed: with the keys and values, and the drafter's, that the new weights give."""
    params = [asked(seed=1), asked(seed=4, temperature=1), asked(temperature=0), asked(seed=6)]
    new = scaled(MODELS / "target")
    llm.generate(PROMPT, max_tokens=2)
    compiled = llm.engine.num_compilations

    def change():
        llm.update_weights(new, version="new", wait=False, recompute=True)

    results = interrupted(llm, PROMPT, params, 7, change)
    assert llm.engine.num_compilations == compiled
    for result, one in zip(results, params, strict=True):
        assert len(result.token_ids) == 50
        assert_goes_on_as_fresh(llm, result, one)
        assert result.reproducible == (len(result.weights_versions) == 1)
    assert [len(one.weights_versions) for one in results[:3]] == [2, 2, 2]
    assert llm.engine.metrics().pages_used == 0


@pytest.mark.parametrize("llm", ["draft"], indirect=True)
def test_settings_count_the_tokens_from_before(llm):
    """The same weights again: texts are those without an update, with every setting that looks at the text."""
    params = [
        asked(seed=2, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2),
        asked(seed=3, bad_words=["self", "one"], logit_bias={300: 2.0}, min_p=0.02),
        asked(temperature=0, logprobs=2, prompt_logprobs=0, ignore_eos=False, min_tokens=40),
    ]
    same, usual = scaled(MODELS / "target", 1.0), [llm.generate(PROMPT, one) for one in params]
    results = interrupted(llm, PROMPT, params, 7, lambda: llm.update_weights(same, wait=False, recompute=True))
    for result, one in zip(results, usual, strict=True):
        assert len(result.weights_versions) == 2
        assert (result.token_ids, result.text) == (one.token_ids, one.text)
    assert results[2].token_logprobs == pytest.approx(usual[2].token_logprobs, abs=1e-5)
    found, wanted = ([list(one or ()) for one in each[2].prompt_logprobs or ()] for each in (results, usual))
    assert found == wanted != []


@pytest.mark.parametrize("llm", ["draft"], indirect=True)
def test_a_grammar_goes_on(llm):
    """It has seen the tokens from before, and drafts that wait to be verified are dropped."""
    params = [asked(seed=seed, structured_outputs={"regex": "([a-z]{3} ){20}"}, ignore_eos=False) for seed in range(3)]
    same, usual = scaled(MODELS / "target", 1.0), [llm.generate(PROMPT, one).text for one in params]
    results = interrupted(llm, PROMPT, params, 7, lambda: llm.update_weights(same, wait=False, recompute=True))
    assert [one.text for one in results] == usual
    assert len(results[0].weights_versions) == 2


def test_requests_in_host_memory_begin_anew():
    """In a pool with pages for two of three texts."""
    llm: Any = jspec.load(MODELS / "target", dtype="float32", num_pages=20, **SIZES)
    params, scheduler = [asked(seed=seed, max_tokens=60) for seed in range(3)], llm.engine.scheduler
    new = scaled(MODELS / "target")
    change = lambda: llm.update_weights(new, wait=False, recompute=True)  # noqa: E731
    results = interrupted(llm, PROMPT, params, lambda: bool(scheduler.swapped), change)
    assert len(results[0].weights_versions) == 2
    for result, one in zip(results, params, strict=True):
        assert len(result.token_ids) == 60
        assert_goes_on_as_fresh(llm, result, one)


def test_recurrent_states_are_computed_anew(tmp_path):
    keys = {"architecture": "Qwen3_5ForCausalLM", "num_hidden_layers": 2}
    before, after = (smallest(tmp_path / str(seed), seed=seed, **keys) for seed in range(2))
    llm: Any = jspec.load(
        before, "ngram", num_draft_tokens=2, dtype="float32", max_batch=2, max_len=192, prefill_chunk=64
    )
    prompt, params = [2 + i % 250 for i in range(70)], [asked(seed=1), asked(seed=2)]
    new = {name: jnp.asarray(x) for name, x in load_file(next(after.glob("*.safetensors"))).items()}
    results = interrupted(llm, prompt, params, 8, lambda: llm.update_weights(new, wait=False, recompute=True))
    for result, one in zip(results, params, strict=True):
        assert len(result.weights_versions) == 2
        assert_goes_on_as_fresh(llm, result, one)


@pytest.mark.parametrize("llm", ["eagle3"], indirect=True)
def test_stale_keys_and_values_are_detected(llm, monkeypatch):
    """Where requests go on with their pages, the tokens are others."""
    new = scaled(MODELS / "target")
    monkeypatch.setattr(Scheduler, "begin_anew", lambda self: None)
    change = lambda: llm.update_weights(new, wait=False, recompute=True)  # noqa: E731
    (result,) = interrupted(llm, PROMPT, [asked(seed=1)], 7, change)
    with pytest.raises(AssertionError):
        assert_goes_on_as_fresh(llm, result, asked(seed=1))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_prompt_of_old_weights_is_said(llm, recompute):
    """A request whose prompt was read, and that had no token yet, is of two laws unless it reads it again."""
    loop, prompt = llm.engine.loop, list(range(20, 110))
    version, params = loop.weights_version, jspec.SamplingParams(max_tokens=4, ignore_eos=True)
    with by_hand(llm.engine) as step:
        id = llm.engine.add(prompt, params)
        step()
        (active,) = [one for one in loop.scheduler.rows if one is not None]
        assert 0 < active.num_prefilled < len(prompt) - 1
        loop.forget_weights()  # as for another draft, of the same update
        loop.forget_weights(recompute)
        loop.weights_version = "new"
    result = drained(llm.engine)[id][-1].result
    loop.weights_version = version
    assert result.weights_versions == ((("new", 0),) if recompute else ((version, 0), ("new", 0)))
    assert result.reproducible == recompute
