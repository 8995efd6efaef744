"""Transformers classes that jspec does not read, and what a user is told about them."""

import difflib
from collections.abc import Iterable

PAGE = "docs/guides/models.md"
_NEAREST = 3  # names that are proposed

_RECURRENT = (
    "some of its layers have a recurrent state other than the gated delta nets of Qwen3.5, which jspec does not compute"
)
_SPARSE = "its attention chooses the keys of each query by an indexer, which jspec does not compute"
# How names of classes begin -> what they need that jspec lacks. The first that a name begins with counts.
_LACKING = {
    "Qwen4Exp": "it has hyper-connections and embeddings of n-grams and of layers, which jspec does not compute",
    "DeepseekV4": "it has hyper-connections and attention to compressed keys, which jspec does not compute",
    "DeepseekV32": _SPARSE,
    "DeepseekV2": "its experts are chosen by a softmax in groups, and jspec computes latents with those of DeepSeek-V3 only",
    "GlmMoeDsa": _SPARSE,
    "KimiLinear": _RECURRENT,
    "NemotronH": _RECURRENT,
    "Jamba": _RECURRENT,
    "Bamba": _RECURRENT,
    "FalconH1": _RECURRENT,
    "FalconMamba": _RECURRENT,
    "GraniteMoeHybrid": _RECURRENT,
    "Zamba": _RECURRENT,
    "MiniMaxM1": _RECURRENT,
    "MiniMaxText01": _RECURRENT,
    "MiniMaxForCausalLM": _RECURRENT,
    "BailingHybrid": _RECURRENT,
    "BailingMoeLinear": _RECURRENT,
    "BailingMoeV2_5": _RECURRENT,
    "BailingMoeV3": _RECURRENT,
    "Mamba": _RECURRENT,
    "Rwkv": _RECURRENT,
    "RWKV": _RECURRENT,
    "xLSTM": _RECURRENT,
    "RecurrentGemma": _RECURRENT,
    "OlmoHybrid": _RECURRENT,
    "Hymba": _RECURRENT,
    "Plamo2": _RECURRENT,
    "Phi4Flash": _RECURRENT,
    "Glm5Next": _RECURRENT,
    "LaraMini": _RECURRENT,
    "Zaya": _RECURRENT,
    "Lfm2": "some of its layers are convolutions with a state, which jspec does not keep",
    "Gemma3n": "it has embeddings of layers and several residual streams, which jspec does not compute",
    "Llama4": "its attention is cut into chunks of a text, which jspec does not compute",
    "LongcatFlash": "its layers have two attentions and experts that do nothing, which jspec does not compute",
}


def why_not(name: str, known: Iterable[str]) -> str:
    """What a user is told about the transformers class ``name``, which is not among ``known``; empty for none."""
    lacking = next((words for prefix, words in _LACKING.items() if name.startswith(prefix)), None)
    if lacking is not None:
        return f"not read, because {lacking}; {PAGE} lists the classes that are"
    near = difflib.get_close_matches(name, list(known), _NEAREST)
    nearest = f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else ""
    return f"expected one class of those that {PAGE} lists{nearest}"
