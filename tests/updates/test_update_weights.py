"""What a model with new weights generates, what refuses them, and what an update that ends early leaves."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import shared
from safetensors.numpy import load_file, save_file
from stored_params import stored_checkpoint
from tiny import smallest

import jspec
from jspec.engine.scheduler.page_pool import PagePool
from jspec.models import flat_params
from jspec.models.params import place
from jspec.updates.target import TargetWeights

generate: Any = jspec.generate
MODELS = Path(jspec.__file__).parent / "demo_models"
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 128, "page_size": 8, "prefill_chunk": 8, "prefill_tokens": 32}
PROMPT = "def main(arguments):\n    return [int(one) for one in arguments if one]\n"


def weights_of(folder: Path, times: float = 1.0) -> dict[str, jax.Array]:
    """The arrays of a folder, of which matrices are multiplied by a number."""
    held = load_file(next(folder.glob("*.safetensors")))
    return {
        name: jnp.asarray(x * np.asarray(times, x.dtype) if x.ndim > 1 and times != 1 else x)
        for name, x in held.items()
    }


@shared
def demo(draft: str | None) -> Any:
    options: dict[str, Any] = {} if draft is None else {"num_draft_tokens": 3}
    where = draft if draft in (None, "ngram") else MODELS / draft
    return jspec.load(MODELS / "target", where, dtype="float32", **SIZES, **options)


def texts(llm: Any, **options) -> list:
    """Of prompts that begin alike, so that the second one finds pages of the first, at both kinds of temperature."""
    prompts = [PROMPT + end for end in ("x = ", "class ")]
    results = [llm.generate(one, seed=3, max_tokens=12, **options) for one in prompts]
    results += [llm.generate(one, temperature=0, max_tokens=12, **options) for one in prompts]
    return [(one.token_ids, one.stats.num_steps) for one in results]


@pytest.fixture
def llm(request):
    """A model that is shared, with the weights of its folders again behind each test."""
    model = demo(getattr(request, "param", None))
    yield model
    model.restore()


@pytest.mark.parametrize("llm", [None, "ngram", "draft", "eagle3"], indirect=True)
def test_texts_are_those_of_a_fresh_engine(llm):
    """Whose prefix cache has nothing of the weights of before, and whose drafter neither."""
    new, before = weights_of(MODELS / "target", 1.25), texts(llm)
    compiled = llm.engine.num_compilations
    llm.update_weights(new)
    after, logits = texts(llm), llm.logits([5, 6, 7])
    llm.restore()
    assert texts(llm) == before != after
    llm.update_weights(new, atomic=True)
    assert texts(llm) == after
    np.testing.assert_array_equal(llm.logits([5, 6, 7]), logits)
    assert llm.engine.num_compilations == compiled
    assert not any(array.is_deleted() for array in new.values())


def fresh_texts(llm: Any) -> list:
    """``texts`` with an empty prefix cache."""
    llm.engine.between_requests(llm.engine.loop.forget_weights)
    return texts(llm)


@pytest.mark.parametrize("llm", [None, "eagle3"], indirect=True)
def test_stale_pages_are_detected(llm, monkeypatch):
    """Those of the target, and those of a drafter that alone is replaced."""
    texts(llm)
    monkeypatch.setattr(PagePool, "forget_prefixes", lambda self: None)
    if llm.method is None:
        llm.update_weights(weights_of(MODELS / "target", 1.25))
    else:
        llm.update_weights(draft=weights_of(MODELS / "eagle3", 0.5))
    stale = texts(llm)
    monkeypatch.undo()
    assert stale != fresh_texts(llm)


def test_stale_snapshots_are_detected(tmp_path, monkeypatch):
    """Those of recurrent states, of which prompts with the same first 64 tokens begin with one."""
    keys = {"architecture": "Qwen3_5ForCausalLM", "num_hidden_layers": 2}
    before, after = (smallest(tmp_path / str(seed), seed=seed, **keys) for seed in range(2))
    llm: Any = jspec.load(before, dtype="float32", max_batch=2, max_len=192, page_size=16, prefill_chunk=64)
    prompt = [2 + i % 250 for i in range(70)]
    written = lambda: llm.generate([prompt], temperature=0, max_tokens=8)[0]  # noqa: E731
    written()
    assert written().num_cached_tokens >= 64
    with monkeypatch.context() as fault:
        fault.setattr(PagePool, "forget_prefixes", lambda self: None)
        llm.update_weights(weights_of(after))
        stale = written()
    llm.engine.between_requests(llm.engine.loop.forget_weights)
    fresh = written()
    assert fresh.num_cached_tokens == 0 < stale.num_cached_tokens
    assert fresh.token_ids == generate(after, [prompt], temperature=0, max_tokens=8, dtype="float32")[0].token_ids
    assert llm.score([prompt], [fresh.token_ids])[0].tolist() != llm.score([prompt], [stale.token_ids])[0].tolist()


@pytest.mark.parametrize("atomic", [False, True], ids=["in place", "atomic"])
def test_a_model_may_be_given_its_own_weights(llm, atomic):
    """Arrays that are written over, and others with the same memory."""
    before = texts(llm)
    llm.update_weights(flat_params(llm.target), names="jspec", atomic=atomic)
    same = {name: jax.device_put(x, x.sharding) for name, x in flat_params(llm.target).items()}
    llm.update_weights(same, names="jspec", atomic=atomic)
    assert texts(llm) == before


@pytest.mark.parametrize("atomic", [False, True], ids=["in place", "atomic"])
def test_arrays_of_the_caller_stay_its_own(llm, atomic):
    """Even those that need not be changed at all: the next update is not written into them."""
    given = {name: jnp.array(x) for name, x in flat_params(llm.target).items()}
    llm.update_weights(given, names="jspec", atomic=atomic)
    llm.update_weights(weights_of(MODELS / "target", 1.25))
    assert not any(array.is_deleted() for array in given.values())
    before = texts(llm)
    llm.update_weights(given, names="jspec")
    assert texts(llm) != before


@pytest.mark.parametrize("comes", ["a mapping", "a stream", "the folder"])
def test_weights_come_anew_after_a_folder_that_ends_early(llm, comes, monkeypatch):
    """Which leaves arrays that are gone."""
    before, new = texts(llm), weights_of(MODELS / "target")

    def broken(params, wanted):
        found = place(params, wanted)
        for _ in range(5):
            yield next(found)
        raise OSError("the disk has gone")

    with monkeypatch.context() as fault:
        fault.setattr("jspec.updates.target.place", broken)
        with pytest.raises(OSError, match="the disk has gone"):
            llm.update_weights_from(MODELS / "target")
    with pytest.raises(RuntimeError, match="weights incomplete: a folder could not be read"):
        texts(llm)
    calls = {
        "a mapping": lambda: llm.update_weights(new),
        "a stream": lambda: llm.update_weights(new.items()),
        "the folder": llm.restore,
    }
    calls[comes]()
    assert texts(llm) == before


def broken(change: str, new: dict) -> tuple[dict, str]:
    """Weights of which something is wrong, and what the error has to say."""
    name = "model.layers.1.mlp.up_proj.weight"
    array = new[name]
    if change == "missing":
        del new[name]
        return new, f"lacks '{name}'"
    if change == "another name":
        return new | {"model.layers.9.mlp.up_proj.weight": array}, "layers.9"
    if change == "another head":
        head = {"lm_head.weight": new["model.embed_tokens.weight"].at[0, 0].add(1)}
        return new | head, "lm_head.weight'] differs from"
    wrong = {
        "shape": (array.T, f"{name}'] has shape"),
        "integers": (jnp.zeros(array.shape, jnp.int8), f"{name}'] is int8"),
        "NaN": (array.at[3, 4].set(jnp.nan), f"{name}'] has NaN"),
        "NaN on the host": (np.full(array.shape, np.nan, np.float32), f"{name}'] has NaN"),
    }
    return new | {name: wrong[change][0]}, wrong[change][1]


@pytest.mark.parametrize(
    "change", ["missing", "another name", "another head", "shape", "integers", "NaN", "NaN on the host"]
)
def test_a_mapping_is_refused_whole(llm, change):
    before, (new, said) = texts(llm), broken(change, weights_of(MODELS / "target", 1.25))
    version = llm.engine.loop.weights_version
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        llm.update_weights(new)
    assert texts(llm) == before
    assert llm.engine.loop.weights_version == version


@pytest.mark.parametrize("how", ["ends early", "NaN", "raises", "twice"])
@pytest.mark.parametrize("atomic", [False, True], ids=["in place", "atomic"])
def test_a_stream_that_fails(llm, how, atomic, monkeypatch):
    """In place it leaves weights that nothing is served with, until they are whole again."""
    monkeypatch.setattr("jspec.updates.update._AT_ONCE", 2**20)
    before, new = texts(llm), weights_of(MODELS / "target", 1.25)

    def pairs():
        for i, (name, array) in enumerate(new.items()):
            if i == len(new) - 2 and how != "ends early":
                if how == "raises":
                    raise OSError("the trainer has gone")
                yield (name, jnp.full_like(array, jnp.nan)) if how == "NaN" else next(iter(new.items()))
            elif i < len(new) - 2:
                yield name, array

    with pytest.raises(OSError if how == "raises" else ValueError):
        llm.update_weights(pairs(), atomic=atomic)
    if not atomic:
        for call in (lambda: texts(llm), lambda: llm.logits([1, 2]), lambda: llm.score("def", "main")):
            with pytest.raises(RuntimeError, match="weights incomplete"):
                call()
        llm.restore()
    assert texts(llm) == before
    llm.update_weights(new.items())
    assert texts(llm) != before


def test_requests_under_way_end_with_the_weights_that_they_began_with(llm):
    alone = llm.generate(PROMPT, seed=1, max_tokens=60, ignore_eos=True)
    deltas = llm.stream(PROMPT, seed=1, max_tokens=60, ignore_eos=True)
    delta = next(deltas)
    tokens = list(delta.token_ids)
    assert not delta.finished
    new, done = weights_of(MODELS / "target", 1.25), threading.Event()
    version = llm.engine.loop.weights_version

    def update():
        llm.update_weights(new, version="new")
        done.set()

    thread = threading.Thread(target=update)
    thread.start()
    for delta in deltas:
        tokens += delta.token_ids
    thread.join()
    assert done.is_set()
    assert tokens == alone.token_ids
    assert delta.result.weights_versions == ((version, 0),)
    assert llm.generate(PROMPT, max_tokens=2).weights_versions == (("new", 0),)


@pytest.mark.parametrize("as_stream", [False, True], ids=["a mapping", "a stream"])
@pytest.mark.parametrize("llm", [None, "eagle3"], indirect=True)
def test_kept_requests_go_on_with_other_weights(llm, as_stream):
    """And say from which token on; none is lost, and pages of both laws are found by nobody."""
    options = {"seed": 1, "max_tokens": 60, "ignore_eos": True}
    alone, version = llm.generate(PROMPT, **options), llm.engine.loop.weights_version
    new, deltas = weights_of(MODELS / "target", 1.25), llm.stream(PROMPT, **options)
    begun = next(deltas)
    llm.pause("keep")
    with pytest.raises(RuntimeError, match="stand still"):
        llm.update_weights(new)
    llm.update_weights(new.items() if as_stream else new, version="new", wait=False)
    llm.resume()
    *_, last = deltas
    (first, start), (second, behind) = last.result.weights_versions
    assert (first, start, second) == (version, 0, "new")
    assert len(begun.token_ids) <= behind < 60
    assert last.result.token_ids[:behind] == alone.token_ids[:behind]
    assert last.result.token_ids != alone.token_ids
    assert alone.reproducible
    assert not last.result.reproducible
    after = texts(llm)
    assert after == fresh_texts(llm)


@pytest.mark.parametrize("llm", ["eagle3"], indirect=True)
def test_a_drafter_that_grows_old_is_seen(llm):
    """Drafts are counted by the weights that they were verified with, of the newest versions."""
    metrics = llm.engine.metrics
    llm.update_weights(weights_of(MODELS / "target"), version="as it was")
    texts(llm)
    llm.update_weights(weights_of(MODELS / "target", 1.25), version="changed")
    before = metrics()
    texts(llm)
    counts = metrics().drafts_by_version
    drafted, accepted = counts["changed"]
    assert drafted == metrics().num_draft_tokens - before.num_draft_tokens
    assert accepted == metrics().num_accepted_tokens - before.num_accepted_tokens
    assert accepted / drafted < counts["as it was"][1] / counts["as it was"][0]
    for version in range(20):
        llm.engine.loop.weights_version = f"next {version}"
        llm.generate("x", max_tokens=4, ignore_eos=True)
    assert list(metrics().drafts_by_version)[-1] == "next 19"
    assert len(metrics().drafts_by_version) == 16


def test_aborted_requests_leave_the_engine_to_the_update(llm):
    deltas = llm.stream(PROMPT, seed=1, max_tokens=90, ignore_eos=True)
    next(deltas)
    llm.pause("abort")
    llm.update_weights(weights_of(MODELS / "target", 1.25))
    llm.resume()
    *_, last = deltas
    assert last.result.finish_reason == "abort"
    assert len(last.result.weights_versions) == 1


def test_weights_that_were_dropped_have_to_come_anew(llm):
    before, new = texts(llm), weights_of(MODELS / "target", 1.25)
    llm.update_weights(new)
    after = texts(llm)
    for comes in (llm.restore, lambda: llm.update_weights(new)):
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(RuntimeError, match=r"weights incomplete: sleep\(level=2\) dropped them"):
            texts(llm)
        comes()
        assert texts(llm) == (before if comes == llm.restore else after)


def test_a_model_that_sleeps_or_is_closed_takes_no_weights(tmp_path):
    folder = smallest(tmp_path / "model")
    llm: Any = jspec.load(folder, dtype="float32", max_batch=1, max_len=64)
    calls = lambda: llm.update_weights(weights_of(folder)), llm.restore, lambda: llm.update_weights_from(folder)
    llm.sleep()
    for call in calls:
        with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\)"):
            call()
    llm.wake_up()
    llm.close()
    for call in calls:
        with pytest.raises(RuntimeError, match="the model is closed"):
            call()


def test_one_update_at_a_time(llm):
    before, new = texts(llm), weights_of(MODELS / "target", 1.25)

    def pairs():
        yield next(iter(new.items()))
        llm.update_weights(new)

    with pytest.raises(RuntimeError, match="another update of the weights is under way"):
        llm.update_weights(pairs())
    assert texts(llm) == before  # nothing had been written


def test_the_next_callers_wait_for_a_stream(llm):
    """A request that comes between two parts is refused rather than served by half."""
    new, errors = weights_of(MODELS / "target", 1.25), []

    def pairs():
        for i, pair in enumerate(new.items()):
            yield pair
            if i == len(new) // 2:
                try:
                    llm.generate(PROMPT, max_tokens=1)
                except RuntimeError as error:
                    errors.append(str(error))

    llm.update_weights(new)
    expected = texts(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.updates.update._AT_ONCE", 2**18)
        llm.update_weights(pairs())
    assert len(errors) == 1
    assert "weights incomplete" in errors[0]
    assert texts(llm) == expected


def test_callers_wait_while_weights_are_written(llm, monkeypatch):
    """Those of a mapping and of a folder: nobody is refused, and nobody reads what is being written."""
    llm.update_weights(weights_of(MODELS / "target", 1.25))
    before, logits = texts(llm), llm.logits([5, 6, 7])
    writing, goes_on, publish = threading.Event(), threading.Event(), TargetWeights.publish

    def slowly(self):
        writing.set()
        assert goes_on.wait(60)
        publish(self)

    monkeypatch.setattr(TargetWeights, "publish", slowly)
    with ThreadPoolExecutor() as pool:
        updating = pool.submit(llm.update_weights_from, MODELS / "target")
        assert writing.wait(60)
        asked = pool.submit(texts, llm), pool.submit(llm.logits, [5, 6, 7])
        time.sleep(0.2)
        assert not any(one.done() for one in asked)
        goes_on.set()
        updating.result()
        found, numbers = (one.result() for one in asked)
    assert found == texts(llm) != before
    np.testing.assert_array_equal(numbers, llm.logits([5, 6, 7]))
    assert not np.array_equal(numbers, logits)


def test_a_folder_takes_the_place_of_another(tmp_path):
    before, after = (smallest(tmp_path / str(seed), seed=seed) for seed in range(2))
    other = smallest(tmp_path / "other", hidden_size=32)
    llm: Any = jspec.load(before, dtype="float32", max_batch=1, max_len=64)
    llm.update_weights_from(after, version=7)
    written = llm.generate("ab", temperature=0, max_tokens=8)
    assert written.weights_versions == ((7, 0),)
    assert written.token_ids == generate(after, "ab", temperature=0, max_tokens=8, dtype="float32").token_ids
    with pytest.raises(ValueError, match=r"parameter 'embedding' is .*: expected"):
        llm.update_weights_from(other)
    held = load_file(before / "model.safetensors")
    held["model.layers.0.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(held, before / "model.safetensors")
    with pytest.raises(ValueError, match=r"parameter 'layers.0.mlp.down.weight' has NaN or infinity"):
        llm.update_weights_from(before)
    assert llm.generate("ab", temperature=0, max_tokens=8).token_ids == written.token_ids


def test_what_nothing_rounds_to_is_refused_by_name(tmp_path):
    llm: Any = jspec.load(stored_checkpoint(tmp_path / "gptq", "gptq"), dtype="float32", max_batch=1, max_len=64)
    with pytest.raises(
        ValueError, match=r"parameter 'layers\.0.* is in int4_32_float16_zeros.* expected one of int8, fp8"
    ):
        llm.update_weights({})


@pytest.mark.parametrize("llm", ["draft", "eagle3"], indirect=True)
def test_a_draft_is_refused_whole(llm):
    before, folder = texts(llm), MODELS / ("draft" if llm.method == "draft_model" else "eagle3")
    new = weights_of(folder)
    name = next(name for name, array in new.items() if array.ndim == 2)
    for wrong in (
        new | {name: new[name].at[0, 0].set(jnp.nan)},
        new | {name: new[name][1:]},
        {},
        new | {"x": new[name]},
    ):
        with pytest.raises(ValueError, match=r"draft|weights|is missing"):
            llm.update_weights(draft=wrong)
    assert texts(llm) == before
    llm.update_weights(draft=new)
    assert texts(llm) == before


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, ValueError, "weights=None: expected weights, or draft="),
        ({"weights": {}, "names": "torch"}, ValueError, "names='torch': expected one of huggingface, jspec"),
        ({"weights": {}, "version": 1.5}, ValueError, "version=1.5"),
        ({"weights": [], "wait": False}, ValueError, r"wait=False: expected True, or pause\('keep'\) before it"),
        ({"weights": {"model.norm.weight": [1.0]}}, TypeError, r"weights\['model.norm.weight'\] is list"),
        ({"weights": [("model.norm.weight", [1.0])]}, TypeError, r"weights\['model.norm.weight'\] is list"),
    ],
)
def test_wrong_arguments_are_named(llm, arguments, error, said):
    with pytest.raises(error, match=said):
        llm.update_weights(**arguments)


def test_a_model_without_a_draft_refuses_one(llm):
    with pytest.raises(ValueError, match="no drafter with weights"):
        llm.update_weights(draft={})
