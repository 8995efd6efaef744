"""Damaged vocabularies of GGUF files are refused by name."""

import pytest
from gguf_tokenizers import (
    NORMAL,
    gguf,
)

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.gguf.tokenizer import tokenizer_files

GOOD = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]}


class TestDamage:
    @pytest.mark.parametrize(
        ("model", "tokens", "keys", "words"),
        [
            ("bert", ["a"], {}, r"model='bert': expected 'gpt2', 'llama' or 'gemma4'"),
            ("t5", ["a"], {}, "model='t5': expected 'gpt2'"),
            ("rwkv", ["a"], {}, "model='rwkv': expected 'gpt2'"),
            ("plamo2", ["a"], {}, "model='plamo2': expected 'gpt2'"),
            ("gpt2", ["a", "b", "a"], GOOD, r"tokens=.*expected no token twice; 'a' is 0 and 2"),
            (
                "gpt2",
                ["a", "b"],
                GOOD,
                r"merges=\['a b'\]: expected two tokens that are one together; 'a b' is no such",
            ),
            ("gpt2", ["a", "b", "ab"], GOOD | {"token_merges": ["a c"]}, "merges=.*'a c' is no such pair"),
            ("gpt2", ["a", "b", "ab"], GOOD | {"token_merges": ["ab"]}, "merges=.*'ab' is no such pair"),
            ("gpt2", ["a", "b", "ab"], {"tokenizer_pre": "gpt-2"}, "merges=None: expected a list of strings"),
            ("gpt2", ["a", "b", "ab"], GOOD | {"eos_token_id": 3}, r"eos_token_id=3: expected an integer in 0\.\.2"),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"token_types": [1, 1]},
                "token_type has 2 numbers of int32: expected 3 integers",
            ),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"token_types": [1, 1, 7]},
                r"token_type has 3 numbers of int32: expected integers in 0\.\.6",
            ),
            ("gpt2", ["a" * 1025, "b"], GOOD, "tokens=.*expected tokens of at most 1024 characters"),
            (
                "llama",
                ["<unk>", "a", "b"],
                {"token_scores": [0.0, 1.0]},
                "scores has 2 numbers of float32: expected 3 numbers",
            ),
            ("llama", ["<unk>", "a", "b"], {}, "scores=None: expected 3 numbers, one for each token"),
            (
                "llama",
                ["a", "b", "c"],
                {"token_scores": [0.0, float("nan"), 1.0]},
                "scores has 3 .*which pieces are merged first",
            ),
            ("llama", ["a", "b", "c"], {"token_scores": [-1000.0] * 3}, "scores has 3 .*which pieces are merged first"),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"array": ("tokenizer.chat_templates", ["x"])},
                r"chat_template\.x is missing",
            ),
            (
                "gpt2",
                ["a", "b", "ab"],
                GOOD | {"bool": ("tokenizer.chat_template", True)},
                "chat_template=True: expected a",
            ),
        ],
    )
    def test_is_refused(self, model, tokens, keys, words, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        for name, value in ({"token_types": [NORMAL] * len(tokens)} | keys).items():
            getattr(writer, f"add_{name}")(*(value if isinstance(value, tuple) else (value,)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(Refusal, match=rf"x\.gguf: tokenizer\.(ggml\.)?{words}"):
            tokenizer_files(read_header(tmp_path / "x.gguf"))
