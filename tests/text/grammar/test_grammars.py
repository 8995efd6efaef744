"""The form that a request asks for, and what its grammar lets come: which tokens, which drafts, and where the text ends."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pydantic
import pytest

import jspec
from jspec import StructuredOutputsParams
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.text.grammar import grammars as grammars_module
from jspec.text.grammar.constraint import GrammarConstraint
from jspec.text.grammar.grammars import Grammars
from jspec.text.grammar.limits import MAX_BYTES

EOS, V = 0, 2048
ALL = 2**32 - 1


class Point(pydantic.BaseModel):
    x: int


class TestParams:
    def test_a_schema_as_dictionary_text_and_model_is_one_schema(self):
        schema = Point.model_json_schema()
        as_text = StructuredOutputsParams(json=str(schema).replace("'", '"'))
        assert as_text == StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=Point)

    def test_sampling_params_take_a_dictionary(self):
        params = jspec.SamplingParams(structured_outputs={"choice": ["yes", "no"]})
        assert params.structured_outputs == StructuredOutputsParams(choice=("yes", "no"))
        assert jspec.SamplingParams(structured_outputs=params.structured_outputs) == params
        assert jspec.SamplingParams().structured_outputs is None

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, r"structured_outputs=None: expected exactly one of json, regex, choice, grammar, json_object"),
            ({"json": "{}", "regex": "a"}, r"structured_outputs=\['json', 'regex'\]: expected exactly one of"),
            ({"json_object": False}, r"structured_outputs=None: expected exactly one of"),
            ({"json": "{"}, r"json='{': expected a JSON schema.*; Expecting property name"),
            ({"json": 7}, r"json=7: expected a JSON schema"),
            ({"json": {"enum": [object]}}, r"json=.*: expected a JSON schema"),
            ({"regex": ""}, r"regex='': expected a string that is not empty"),
            ({"regex": 7}, r"regex=7: expected a string"),
            ({"grammar": ["a"]}, r"grammar=\['a'\]: expected a string"),
            ({"choice": "yes"}, r"choice='yes': expected a list of at least one string"),
            ({"choice": []}, r"choice=\[\]: expected a list of at least one string"),
            ({"choice": ["yes", ""]}, r"choice='': expected strings that are not empty"),
            ({"choice": ["yes", 1]}, r"choice=1: expected strings"),
            ({"json_object": "yes"}, r"json_object='yes': expected True or False"),
            ({"json_object": True, "disable_any_whitespace": 1}, r"disable_any_whitespace=1: expected True or False"),
            ({"json_object": True, "whitespace_pattern": ""}, r"whitespace_pattern='': expected a string"),
            ({"regex": "a", "disable_any_whitespace": True}, r"whitespace_pattern='regex': expected json or json_obj"),
            ({"choice": ["a"], "whitespace_pattern": " "}, r"whitespace_pattern='choice': expected json or json_obj"),
            ({"jsn": {}}, r"structured_outputs='jsn': expected fields among json, regex,"),
        ],
    )
    def test_impossible_structured_outputs_are_refused(self, fields, message):
        with pytest.raises(ValueError, match=message):
            jspec.SamplingParams(structured_outputs=fields)

    def test_something_else_is_refused(self):
        with pytest.raises(
            ValueError, match=r"structured_outputs=\['a'\]: expected StructuredOutputsParams, or a dict"
        ):
            jspec.SamplingParams(structured_outputs=["a"])

    def test_the_form_alone_says_where_a_text_may_end(self):
        with pytest.raises(ValueError, match=r"min_tokens=2: expected 0 beside structured_outputs"):
            jspec.SamplingParams(min_tokens=2, structured_outputs={"regex": "a+"})


@functools.cache
def tokenizer():
    return load_tokenizer(FAMILY / "target")


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), V, [EOS])


@functools.cache
def vocabulary() -> list[str]:
    """The text of every token; one that is part of a character has a text that is in no language of these tests."""
    return [tokenizer().decode([token], skip_special_tokens=False) for token in range(V)]


def constraint_of(stop_tokens: Sequence[int] = (EOS,), **fields) -> GrammarConstraint:
    return grammars().constraint(StructuredOutputsParams(**fields), stop_tokens)


def flags_of(constraint, drafts: Sequence[int] = (), positions: int = 1) -> np.ndarray:
    """bool ``[positions, V]``, the tokens that may come."""
    flags = np.full((positions, V // 32), ALL, np.uint32)
    constraint.allow(drafts, flags)
    return np.unpackbits(flags.view(np.uint8), bitorder="little").reshape(positions, V).astype(bool)


# Tokens of several characters end before, in and behind each part.
REGEX = r"(def |class )(main|a|self)(\(\)|\(self\):)?"
LANGUAGE = {"".join(s) for s in itertools.product(("def ", "class "), ("main", "a", "self"), ("", "()", "(self):"))}


@functools.cache
def expected_flags(text: str) -> np.ndarray:
    """By definition: a token may come if some text of the language begins with it behind ``text``; the end, behind a text
    of the language."""
    rests = [whole[len(text) :] for whole in LANGUAGE if whole.startswith(text)]
    beginnings = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
    flags = np.array([piece in beginnings for piece in vocabulary()])
    flags[EOS] = text in LANGUAGE
    return flags


def by_token(token: int) -> str:
    return vocabulary()[token]


class TestAllow:
    def test_a_token_may_come_if_the_text_can_go_on_like_that(self):
        """Where the text can go on in one way only, llguidance takes that text's first token, as the tokenizer splits it."""
        in_one_way = []
        for whole in ("class a(self):", "def main", "def self()"):
            constraint, text = constraint_of(regex=REGEX), ""
            for token in [*tokenizer().encode(whole), EOS]:
                found, expected, forced = flags_of(constraint)[0], expected_flags(text), constraint.jump_forward(1)
                if forced and forced != [EOS]:
                    assert expected[forced[0]]
                    expected = np.arange(V) == forced[0]
                np.testing.assert_array_equal(found, expected, err_msg=text)
                in_one_way.append(bool(forced))
                ended = constraint.add([token])
                text += by_token(token)
            assert ended == len(tokenizer().encode(whole)) + 1
        assert len(set(in_one_way)) == 2

    def test_along_drafts_up_to_one_that_may_not_come(self):
        good = tokenizer().encode("class self()")
        refused = tokenizer().encode("class")[0]
        constraint = constraint_of(regex=REGEX)
        for drafts in (good, [*good[:2], refused, *good[2:]], [refused, *good], [*good, EOS, *good[:1]]):
            count = len(drafts) + 1
            found, text = flags_of(constraint, drafts, count + 2), ""
            for place in range(count + 2):
                following = expected_flags(text)
                np.testing.assert_array_equal(found[place], following, err_msg=f"{drafts} at {place}")
                if place == len(drafts) or not following[drafts[place]] or drafts[place] == EOS:
                    break
                text += by_token(drafts[place])
            assert found[place + 1 :].all()  # nobody asks what may come there

    def test_flags_of_drafts_leave_the_constraint_as_it_is(self):
        constraint, drafts = constraint_of(regex=REGEX), tokenizer().encode("def main(self):")
        first = flags_of(constraint, drafts, 9)
        np.testing.assert_array_equal(flags_of(constraint, [*drafts, EOS], 9), first)
        np.testing.assert_array_equal(flags_of(constraint, drafts, 9), first)
        constraint.add(drafts)
        np.testing.assert_array_equal(flags_of(constraint), first[len(drafts) : len(drafts) + 1])

    def test_a_vocabulary_that_is_larger_than_the_tokenizer(self):
        wide = Grammars(tokenizer(), V + 40, [EOS]).constraint(StructuredOutputsParams(regex="[^a]*"), [EOS])
        flags = np.full((1, V // 32 + 2), ALL, np.uint32)
        wide.allow([], flags)
        assert flags[0, 0] & 1
        assert not flags[0, V // 32]  # tokens without a text
        assert not flags[0, V // 32 + 1] & 0xFF


class TestForced:
    def test_the_text_that_has_to_come(self):
        constraint, whole = (
            constraint_of(choice=["def main(self):", "def main(args):"]),
            tokenizer().encode("def main("),
        )
        forced = constraint.jump_forward(9)
        assert forced
        assert "def main(".startswith("".join(map(by_token, forced)))
        assert constraint.jump_forward(1) == forced[:1]
        assert constraint.jump_forward(0) == []
        constraint.add(whole)
        assert constraint.jump_forward(9) == []  # two texts are left

    def test_the_end_is_forced_where_nothing_else_can_come(self):
        constraint = constraint_of(choice=["def"])
        constraint.add(tokenizer().encode("def"))
        assert constraint.jump_forward(3) == [EOS]
        assert constraint.jump_forward(0) == []
        without = constraint_of((), choice=["def"])
        without.add(tokenizer().encode("def"))
        assert without.jump_forward(3) == []


class TestEnd:
    def test_with_the_stop_token(self):
        tokens = tokenizer().encode("class self")
        constraint = constraint_of(regex=REGEX)
        assert [constraint.add([token]) for token in tokens] == [None] * len(tokens)
        assert constraint.add([EOS, 5]) == len(tokens) + 1

    def test_without_a_stop_token_where_nothing_can_follow(self):
        tokens = tokenizer().encode("def main(self):")
        constraint = constraint_of((), regex=REGEX)
        assert constraint.add([*tokens, 5, 6]) == len(tokens)
        open_ended = constraint_of((), regex=REGEX)
        assert open_ended.add(tokenizer().encode("def main")) is None

    def test_the_end_of_text_ends_it_even_where_it_is_no_stop_token(self):
        """``ignore_eos`` cannot go on behind it: nothing in the grammar can follow."""
        tokens = tokenizer().encode("def main")
        constraint = constraint_of((), regex=REGEX)
        assert constraint.add([*tokens, EOS]) == len(tokens) + 1

    def test_drafts_behind_such_an_end_are_not_asked_about(self):
        tokens = tokenizer().encode("def main(self):")
        found = flags_of(constraint_of((), regex=REGEX), [*tokens, 5], len(tokens) + 2)
        assert not found[len(tokens) - 1].all()
        assert found[len(tokens) :].all()

    def test_a_token_that_may_not_come_is_an_error(self):
        with pytest.raises(RuntimeError, match="the grammar does not allow token 5"):
            constraint_of(regex="[0-9]").add([5])


@pytest.mark.parametrize(
    "text", ['say "hi"', "a\n\tb", "back\\slash \\n", "café €", "\U0001f600", "a/b/", "\x7f\x01", "\u2028", "(.*)|'"]
)
def test_choice_matches_only_its_texts(text):
    tokens = tokenizer().encode(text)
    constraint = constraint_of(choice=[text, "something else"])
    for token in [*tokens, EOS]:
        assert flags_of(constraint)[0, token]
        constraint.add([token])
    constraint = constraint_of(choice=[text, "something else"])
    constraint.add(tokens)
    assert np.flatnonzero(flags_of(constraint)[0]).tolist() == [EOS]


class TestKinds:
    @pytest.mark.parametrize(
        ("fields", "good", "bad"),
        [
            ({"json": Point}, '{"x": -7}', '{"x": a'),
            ({"json": Point, "disable_any_whitespace": True}, '{"x":-7}', '{"x" :'),
            ({"json": Point, "whitespace_pattern": " "}, '{ "x" : 7 }', '{\n"x'),
            ({"json_object": True}, '{"a": [1, {"b": null}], "ü": "€"}', "[1"),
            ({"grammar": 'start: item ("," item)*\nitem: /[a-z]+/'}, "a,bc,def", "a,,"),
            ({"regex": "[ä-ü]{3}"}, "äöü", "äöx"),
        ],
    )
    def test_a_constraint_takes_texts_that_fit_and_no_others(self, fields, good, bad):
        constraint = constraint_of(**fields)
        constraint.add(tokenizer().encode(good))
        assert flags_of(constraint)[0, EOS]
        constraint = constraint_of(**fields)
        with pytest.raises(RuntimeError, match="the grammar does not allow token"):
            constraint.add(tokenizer().encode(bad))

    def test_requests_of_one_grammar_do_not_share_their_place(self):
        first, second = constraint_of(regex=REGEX), constraint_of(regex=REGEX)
        first.add(tokenizer().encode("def "))
        np.testing.assert_array_equal(flags_of(second)[0], expected_flags(""))


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"regex": "(a"}, "unclosed group"),
            ({"regex": "(?=a)b"}, "look-around"),
            ({"regex": "structured_outputs("}, "unclosed group"),
            ({"grammar": "start: b"}, "unknown name"),
            ({"grammar": 'b: "a"'}, "no start rule"),
            ({"json": {"type": "nope"}}, "Invalid type: nope"),
            ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "Unsatisfiable schema"),
            ({"json": {"$ref": "#/$defs/x"}}, "does not exist"),
            ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
            ({"json": {"enum": ["a" * MAX_BYTES]}}, f"at most {MAX_BYTES}"),
        ],
    )
    def test_a_grammar_that_is_none_names_the_field(self, fields, message):
        with pytest.raises(ValueError, match=f"structured_outputs has no usable grammar: .*{message}"):
            constraint_of(**fields)

    @pytest.mark.parametrize("place", ["https://example.com/schema.json", "file:///etc/hostname"])
    def test_a_schema_is_never_fetched(self, place):
        with pytest.raises(ValueError, match=r"structured_outputs has no usable grammar: .*does not fetch resources"):
            constraint_of(json={"$ref": place})

    def test_without_llguidance(self, monkeypatch):
        monkeypatch.setattr(grammars_module, "available", lambda: False)
        with pytest.raises(ValueError, match=r"needs llguidance: pip install 'jspec\[structured\]'"):
            constraint_of(regex="a")

    def test_without_a_tokenizer(self):
        with pytest.raises(ValueError, match="structured_outputs needs a tokenizer, and the checkpoint has none"):
            Grammars(None, V, [EOS]).constraint(StructuredOutputsParams(regex="a"), [EOS])

    def test_with_a_tokenizer_that_llguidance_cannot_read(self):
        class Strange:
            eos_token_id = 0

            def get_vocab(self):
                return {"a": 0}

        with pytest.raises(ValueError, match="structured_outputs: llguidance cannot read the checkpoint's tokenizer"):
            Grammars(Strange(), 1, [EOS]).constraint(StructuredOutputsParams(regex="a"), [EOS])  # type: ignore[arg-type]
