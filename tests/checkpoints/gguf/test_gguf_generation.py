"""End tokens and sampling defaults from GGUF files are those of the original ``generation_config.json``."""

from pathlib import Path

import pytest

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.generation import generation_fields
from jspec.checkpoints.gguf.header import read_header
from jspec.sampling.params import SamplingParams

gguf = pytest.importorskip("gguf")

NORMAL, _, CONTROL, USER_DEFINED = range(1, 5)
HARMONY = {
    "<|endoftext|>": CONTROL,
    "<|return|>": CONTROL,
    "<|call|>": CONTROL,
    "<|end|>": CONTROL,
    "<|start|>": CONTROL,
}


def read(path: Path, tokens: dict[str, int], template: str | None = "{{ 1 }}", **keys):
    """The fields and the sentence of a file with these tokens, text -> type; ids in ``keys`` are texts of tokens."""
    writer = gguf.GGUFWriter(path / "x.gguf", "llama")
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
    if template is not None:
        writer.add_chat_template(template)
    for name, value in keys.items():
        value = list(tokens).index(value) if name.endswith("_id") else value
        getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields, sentence = generation_fields(read_header(path / "x.gguf"))
    return fields, sentence.replace(f"{path}/", "")


class TestEnds:
    @pytest.mark.parametrize(
        ("tokens", "ids", "ends"),
        [
            # Qwen2.5: <|im_end|> and <|endoftext|>
            ({"a": NORMAL, "<|endoftext|>": CONTROL, "<|im_end|>": CONTROL}, {"eos": "<|im_end|>"}, [2, 1]),
            # Llama 3.1
            ({"<|end_of_text|>": CONTROL, "<|eom_id|>": CONTROL, "<|eot_id|>": CONTROL}, {"eos": "<|eot_id|>"}, [2, 0, 1]),
            # gpt-oss, in which <|end|> ends a message, and Phi-3, in which it ends a turn
            (HARMONY, {"eos": "<|return|>"}, [1, 0, 2]),
            ({"<|endoftext|>": CONTROL, "<|end|>": CONTROL}, {"eos": "<|endoftext|>"}, [0, 1]),
            ({"<|end|>": CONTROL, "<|flush|>": CONTROL, "<|calls|>": CONTROL}, {}, [1, 2]),
            # Gemma 3, in which </s> is a tag of HTML, and Gemma 4
            ({"<eos>": CONTROL, "</s>": USER_DEFINED, "<end_of_turn>": CONTROL}, {"eos": "<eos>"}, [0, 2]),
            ({"<eos>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": USER_DEFINED}, {"eos": "<eos>"}, [0, 1, 2]),
            ({"<s>": CONTROL, "</s>": CONTROL}, {"eos": "</s>"}, [1]),
            # GLM-4.5, whose converter writes other tokens under eot and eom
            ({"<|user|>": CONTROL, "<|observation|>": CONTROL, "<|endoftext|>": CONTROL},
             {"eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"}, [2, 0, 1]),
            # a text that is no token of its own, and tokens of infilling, which end no text
            ({"<EOT>": NORMAL, "<|fim_pad|>": CONTROL, "<|file_sep|>": CONTROL, "x": NORMAL}, {"eos": "x"}, [3]),
        ],
    )  # fmt: skip
    def test_are_those_of_the_original(self, tokens, ids, ends, tmp_path):
        fields, _ = read(tmp_path, tokens, **{f"{name}_token_id": text for name, text in ids.items()})
        assert fields["eos_token_id"] == ends

    def test_of_a_base_model_are_those_that_the_file_names(self, tmp_path):
        tokens = {"<eos>": CONTROL, "<end_of_turn>": CONTROL}
        assert read(tmp_path, tokens, template=None, eos_token_id="<eos>")[0] == {"eos_token_id": [0]}

    def test_a_file_without_tokens(self, tmp_path):
        assert read(tmp_path, {})[0] == {}

    def test_ids_beyond_the_tokens_are_refused(self, tmp_path):
        with pytest.raises(Refusal, match=r"x\.gguf: tokenizer\.ggml\.eot_token_id=9: expected an integer in 0\.\.0"):
            read(tmp_path, {"a": NORMAL}, uint32=("tokenizer.ggml.eot_token_id", 9))


class TestSampling:
    def test_defaults_of_the_file(self, tmp_path):
        """Numbers are as in the original, and not what 32 bits make of them."""
        tokens = {"<|im_end|>": CONTROL}
        keys = {"sampling_temp": 0.6, "sampling_top_k": 20, "sampling_top_p": 0.95, "sampling_min_p": 0.05}
        fields, sentence = read(tmp_path, tokens, **keys, sampling_penalty_repeat=1.05, eos_token_id="<|im_end|>")
        sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
        assert fields == {"eos_token_id": [0], "do_sample": True, **sampling}
        assert sentence == ""
        SamplingParams(**sampling)

    def test_a_temperature_of_zero(self, tmp_path):
        assert read(tmp_path, {"a": NORMAL}, sampling_temp=0.0)[0] == {"do_sample": False, "temperature": 0.0}

    @pytest.mark.parametrize(("kind", "value"), [("bool", True), ("string", "0.6"), ("float32", float("nan"))])
    def test_no_number_is_refused(self, kind, value, tmp_path):
        with pytest.raises(Refusal, match=r"x\.gguf: general\.sampling\.temp=.*: expected a number"):
            read(tmp_path, {}, **{kind: ("general.sampling.temp", value)})  # pyright: ignore[reportArgumentType]


TOKENS = {"<|endoftext|>": CONTROL, "<|im_end|>": CONTROL, "<|eot_id|>": CONTROL}


class TestSentence:
    def test_names_what_was_made_up_and_what_is_missing(self, tmp_path):
        _, sentence = read(tmp_path, TOKENS, eos_token_id="<|im_end|>")
        assert sentence == (
            "x.gguf lacks the end tokens <|endoftext|>, <|eot_id|>, which are taken by their text as in llama.cpp, and the "
            "original's sampling defaults; give temperature, top_k and top_p if it has some."
        )

    def test_names_what_was_made_up(self, tmp_path):
        _, sentence = read(tmp_path, TOKENS, eos_token_id="<|im_end|>", eot_token_id="<|eot_id|>", sampling_temp=1.0)
        assert sentence == "x.gguf lacks the end tokens <|endoftext|>, which are taken by their text as in llama.cpp."

    def test_names_what_is_missing(self, tmp_path):
        _, sentence = read(tmp_path, {"a": NORMAL}, eos_token_id="a")
        assert sentence == (
            "x.gguf lacks the original's sampling defaults; give temperature, top_k and top_p if it has some."
        )
