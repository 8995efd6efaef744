"""``jspec doctor``: a good draft is called healthy, and of a bad one the reason is named."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from causal_heads import causal_drafts
from engines import TARGET, V, plain_greedy, ragged_prompts, target
from heads import BLOCK, HEADS, VARIANTS, random_head, trained_head
from resaved import set_keys
from tiny import tiny_checkpoint, tiny_tokenizer

from convert.folders import load_draft
from jspec.checkpoints.layouts.options import HeadOptions, OpenSetting
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.cli import main
from jspec.commands.demo import FAMILY
from jspec.doctor import Trial, diagnose, read_prompts
from jspec.doctor.checks import windows
from jspec.doctor.diagnosis import verdict
from jspec.doctor.trials import Text, Trials
from jspec.doctor.variants import layouts, try_variants
from jspec.models import flat_params
from jspec.outputs import Stats
from jspec.text.prompts import token_ids

PROMPTS = [
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    'def read_config(path):\n    """Return the configuration',
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    return file


def native(folder, ids):
    """The family's EAGLE-3 head in a native layout, which does not say what its layer ids mean."""
    config = json.loads((FAMILY / "eagle3" / "config.json").read_text())
    written = {key: config[key] for key in ("draft_vocab_size", "target_hidden_size")}
    written |= {**config["transformer_layer_config"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **written}))
    shutil.copy(FAMILY / "eagle3" / "model.safetensors", folder)
    return folder


def test_healthy_head_has_no_finding(prompts, capsys):
    command = ["doctor", "--target", str(FAMILY / "target"), "--draft", str(FAMILY / "eagle3")]
    assert main([*command, "--prompts", str(prompts), "--max-tokens", "48"]) == 0
    out = capsys.readouterr().out
    for words in (
        "healthy: An acceptance length of 2.",
        "after layers 1, 3, 5 of 6",
        "1024 of 2048 tokens",
        "as read",
        'product: layers.*.mlp.down [320, 1280] in float32 by "XLA", not by "one token, reduction" (5 tokens are not 1)',
    ):
        assert words in out
    lengths = [float(line.split()[-5]) for line in out.splitlines() if line.split()[:1] in (["served"], ["as"])]
    assert len(lengths) == 2
    assert abs(lengths[0] - lengths[1]) < 0.15  # the engine's rounds, but for those that end past the text
    assert min(lengths) > 2


def test_a_wrong_convention_is_named(prompts, tmp_path):
    """The head was trained with aux_layers 1, 3, 5: the outputs of layers 0, 2, 4."""
    head = native(tmp_path / "head", [0, 2, 4])
    read = {"prompts": read_prompts(prompts), "max_tokens": 32, "num_draft_tokens": 3}
    found = diagnose(FAMILY / "target", head, aux_convention="input_of", **read)
    assert found.verdict == "wrong_setting"
    assert "was trained with aux_convention='output_of'" in found.explanation
    labels = [trial.setting for trial in found.trials]
    assert labels[:2] == [None, "the normed output fed back"]
    assert "aux_convention='output_of' and the normed output fed back" in labels
    assert found.trials[2].stats.mean_acceptance_length > found.trials[0].stats.mean_acceptance_length + 0.3


@pytest.mark.parametrize(
    ("ids", "verdict", "words"),
    [
        ([0, 2, 4], "wrong_setting", "was trained with aux_convention='output_of'"),
        ([1, 3, 5], "healthy", "does not say aux_convention='input_of', which fits: give it to jspec."),
    ],
)
def test_settings_that_a_checkpoint_leaves_open_are_measured(prompts, tmp_path, ids, verdict, words):
    head = native(tmp_path / "head", ids)
    with pytest.raises(OpenSetting, match=r"or let 'jspec doctor' measure it, which tries input_of and output_of"):
        _ = load_draft(head)
    found = diagnose(FAMILY / "target", head, prompts=read_prompts(prompts)[:1], max_tokens=32, num_draft_tokens=3)
    assert (found.verdict, words in found.explanation) == (verdict, True), found.explanation


def test_a_random_head_is_called_untrained(tmp_path):
    folder = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    prompts = [[3, 4, 5], [7, 8], list(range(20, 45))]
    settings = {"prompts": prompts, "max_tokens": 24, "num_draft_tokens": 2}
    found = diagnose(folder, tiny_heads.eagle3(tmp_path / "head"), **settings)
    assert found.verdict == "untrained"
    assert "hardly predicts this target" in found.explanation
    assert len(found.trials) == 6
    again = diagnose(folder, tmp_path / "head", **settings)
    assert [one.rounds.tolist() for one in again.trials] == [one.rounds.tolist() for one in found.trials]
    assert again.explanation == found.explanation


@pytest.mark.parametrize("name", ["draft", "eagle"])
def test_a_draft_with_another_tokenizer_is_named(tmp_path, capsys, name):
    folder = tmp_path / name
    shutil.copytree(FAMILY / name, folder)
    tiny_tokenizer(folder, first="!")
    assert main(["doctor", "--target", str(FAMILY / "target"), "--draft", str(folder)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "mismatch: Target and draft do not belong together:" in out
    assert "tokens have other ids in the draft's tokenizer" in out


def test_a_head_of_another_target_is_named(tmp_path):
    other = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    found = diagnose(other, tiny_heads.eagle3(tmp_path / "head", vocab_size=90), prompts=[[1, 2]])
    assert (found.verdict, found.served, found.trials) == ("mismatch", None, ())
    assert "vocabulary of 90, and this target's is 97" in found.explanation


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "nowhere"], "draft='nowhere': expected a checkpoint folder"),
        (["--draft", "{head}", "--max-tokens", "1"], "max_tokens=1: expected an integer of at least 2"),
        (["--draft", "{head}", "--num-draft-tokens", "0"], "num_draft_tokens=0: expected an integer of at least 1"),
        (["--draft", "{head}"], "the target has no tokenizer: expected prompts of token ids"),
    ],
)
def test_mistakes_raise_errors(tmp_path, capsys, arguments, words):
    folder = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    head = tiny_heads.eagle3(tmp_path / "head")
    assert main(["doctor", "--target", str(folder), *(argument.format(head=head) for argument in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_too_few_tokens_are_reported(tmp_path):
    folder, draft = tiny_checkpoint(tmp_path / "target"), tiny_heads.mlp_speculator(tmp_path / "draft")
    with pytest.raises(ValueError, match=r"the target wrote [1-4] tokens in all .* expected at least 16"):
        diagnose(folder, draft, [[5, 6]], max_tokens=4, num_draft_tokens=1)


def test_texts_become_messages_where_there_is_a_chat_template(tmp_path):
    tiny_tokenizer(tmp_path)
    template = "{% for message in messages %}[{{ message['role'] }}:{{ message['content'] }}]{% endfor %}>"
    set_keys(tmp_path / "tokenizer_config.json", chat_template=template)
    tokenizer, config = load_tokenizer(tmp_path), dataclasses.replace(TARGET, max_position=64, vocab_size=300)
    assert tokenizer is not None
    for chat, text in ((None, "[user:hi]>"), (True, "[user:hi]>"), (False, "hi")):
        [ids] = token_ids(["hi"], tokenizer, config, chat)
        assert ids == tokenizer.encode(text)
    [ids] = token_ids(["x" * 99], tokenizer, config, False)
    assert len(ids) == 32
    with pytest.raises(ValueError, match=r"prompt 1 has token id \d+: expected 0\.\.28, the target's vocabulary"):
        token_ids([[3], "hi"], tokenizer, TARGET, False)


def test_prompts_are_read_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "a.txt") == ["one", "two"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "a\\nb"}\n\n{"text": "c\u2028", "prompt": "d"}\n{"text": "e"}\n')
    assert read_prompts(tmp_path / "b.jsonl") == ["a\nb", "d", "e"]
    for content, words in (
        (b'\n{"body": "c"}', r"c.jsonl:2: expected an object with a text under 'prompt' or 'text'"),
        (b'{"prompt": [1]}', r"c.jsonl:1: expected an object with a text under"),
        (b'{"prompt": "a"}\n[', r"c.jsonl:2: expected a JSON object"),
        (
            b"\xff",
            r"prompts='.*c.jsonl': expected a file of text in UTF-8 \('utf-8' codec can't decode byte 0xff in position 0",
        ),
        (b"\n", r"prompts='.*c.jsonl': expected a file with text in it"),
    ):
        (tmp_path / "c.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_prompts(tmp_path / "c.jsonl")


def trial(rounds, setting=None) -> Trial:
    counts = np.asarray(rounds)
    return Trial(setting or "read", setting, Stats.of(3, [3] * len(counts), counts.tolist()), counts)


def test_verdicts_follow_the_acceptance_rates():
    base, rng = np.tile([0, 1, 2, 0], 25), np.random.default_rng(0)
    read, noise = trial(base), trial(rng.permutation(base), "noise")
    assert verdict(read.stats, [read, noise])[0] == "healthy"
    slightly, clearly = trial(np.where(np.arange(100) < 5, 3, base), "a little"), trial(base + 1, "more")
    assert verdict(read.stats, [read, slightly])[0] == "healthy"
    name, why = verdict(read.stats, [read, slightly, clearly, noise])
    assert name == "wrong_setting"
    assert "trained with more: an acceptance length of 2.75 instead of 1.75" in why
    nothing = trial(np.eye(1, 100)[0].astype(int))
    assert verdict(nothing.stats, [nothing, nothing])[0] == "untrained"
    assert verdict(nothing.stats, [])[0] == "untrained"
    assert verdict(nothing.stats, [nothing, clearly])[0] == "wrong_setting"


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "dflash", "dspark", "jetspec", "dspark-vanilla"])
def test_trials_equal_causal_passes(name):
    """Of every round in a text, the drafts that are the text's own tokens, for as long as they are."""
    config: Any = VARIANTS[name]
    head, K, S = random_head(config), 3, 16
    model, aux_layers = target(), config.resolved_aux_layers(TARGET)
    lengths = np.arange(2, S - K + 1)
    compute = jax.jit(lambda text: causal_drafts(config, head, model, text, jnp.asarray(lengths), K).logits)
    tokens = np.random.default_rng(1).integers(V, size=S)
    for length in range(2, S - K + 1):  # the text goes on, now and then, as the head drafts
        drafts = np.argmax(compute(np.tile(tokens, (len(lengths), 1)))[length - 2], axis=-1)
        if length % 4 == 2:
            tokens[length] = drafts[0]
        if length % 4 == 3:
            tokens[length] = drafts[0] if length % 8 == 3 else (drafts[0] + 1) % V
    drafts = np.argmax(compute(np.tile(tokens, (len(lengths), 1))), axis=-1)
    right = drafts == tokens[lengths[:, None] + np.arange(K)]
    expected = np.cumprod(right, axis=1).sum(axis=1)
    trials = Trials(model, [Text(tuple(tokens.tolist()), 2)], [*aux_layers, 2])
    [found] = trials.accepted(config, flat_params(head), aux_layers, K, "float32")
    assert found[: len(lengths)].tolist() == expected.tolist()
    assert {0, 1, 2} <= set(expected.tolist())
    stats = trials.stats([found], K)
    assert stats.num_steps + stats.num_accepted_draft_tokens >= S - 2


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_drafter_of_the_other_layout_is_named(name):
    """Whether the anchor's slot drafts is no matter of shapes: a checkpoint that says it wrongly drafts one token early or
    late."""
    right: Any = HEADS[name]
    flipped = dataclasses.replace(right, anchor_first=not right.anchor_first)
    prompts = ragged_prompts()
    written = zip(prompts, plain_greedy(target(), prompts), strict=True)
    texts = [Text((*prompt, *tokens), len(prompt)) for prompt, tokens in written]
    params = flat_params(trained_head(right))

    def found(config):
        trials = try_variants(target(), config, params, texts, 3, "float32", HeadOptions())
        return verdict(trials[0].stats, trials)

    assert found(right)[0] == "healthy"
    kind, said = found(flipped)
    assert kind == "wrong_setting"
    assert f"sample_from_anchor {str(right.anchor_first).lower()}" in said


@pytest.mark.parametrize("anchored", [True, False])
def test_where_windows_begin_is_measured(anchored):
    """Of a head that was trained with either rule, in texts that are longer than its windows."""
    change: Any = {
        "layers": dataclasses.replace(BLOCK, windows=(3, 3)),
        "causal": (True, True),
        "windows_from_anchor": anchored,
    }
    right: Any = dataclasses.replace(HEADS["dflash"], **change)
    flipped = dataclasses.replace(right, windows_from_anchor=not anchored)
    prompts = ragged_prompts()
    written = zip(prompts, plain_greedy(target(), prompts), strict=True)
    texts, params = (
        [Text((*prompt, *tokens), len(prompt)) for prompt, tokens in written],
        flat_params(trained_head(right)),
    )
    trials = try_variants(target(), flipped, params, texts, 3, "float32", HeadOptions())
    assert [trial.label for trial in trials][-1] == f"windows_from_anchor {str(anchored).lower()}"
    kind, said = verdict(trials[0].stats, trials)
    assert kind == "wrong_setting"
    assert (
        f"counted from {'the anchor' if anchored else 'each slot'}, windows_from_anchor {str(anchored).lower()}" in said
    )
    assert [head for *_, head in layouts(flipped, 4)][-1] == right
    assert len(list(layouts(flipped, 3))) == 2  # the rules are the same in texts of 3 tokens
    [(long, detail), (short, more)] = [
        (check.status, check.detail) for some in (texts, [Text((1, 2, 3), 1)]) for check in windows(flipped, some)
    ]
    assert (long, short) == ("ok", "note")
    assert more.startswith(f"{detail}; no text has more than 3 tokens")


def test_windows_of_both_kinds_of_layers_are_tried_both_ways():
    head: Any = dataclasses.replace(HEADS["dflash"], layers=dataclasses.replace(BLOCK, windows=(9, 9)))
    tried = [(key, other.windows_from_anchor, other.windows_by_slot) for key, _, other in list(layouts(head, 40))[2:]]
    assert tried == [("windows_from_anchor true", True, False), ("windows_from_anchor false", False, True)]
    narrow = dataclasses.replace(head, layers=dataclasses.replace(BLOCK, windows=(4, 9)))
    assert [key for key, *_ in layouts(narrow, 40)][2:] == ["windows_from_anchor true"]


def test_the_family_head_in_a_native_layout_is_the_same(tmp_path):
    config, params = load_draft(native(tmp_path / "head", [1, 3, 5]), aux_convention="input_of")
    known, theirs = load_draft(FAMILY / "eagle3")
    assert dataclasses.replace(config, trained_drafts=7) == known
    assert all(np.array_equal(params[name], theirs[name]) for name in theirs)
