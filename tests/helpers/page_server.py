"""A server whose model writes HTML, round by round, for the page at ``/``; run as a process."""

import numpy as np
from engines import bigram, drafting
from openai_server import CHAT

import jspec
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.config import EngineConfig, Speculation
from jspec.llm import LLM
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import Keys
from jspec.serving.http.server import listener
from jspec.serving.http.settings import ServerSettings
from jspec.serving.server.lifecycle import run

V, K = 2048, 3
HTML = "<img src=x onerror>"  # no token of which comes twice
KEY = "a-key"


def model() -> LLM:
    """After each token of ``HTML`` comes the next with certainty, and a wrong draft after the first two."""
    tokenizer = load_tokenizer(FAMILY / "target")
    loop = tokenizer.encode(HTML, add_special_tokens=False)
    assert len(set(loop)) == len(loop)
    table = np.zeros((V, V), np.float32)
    table[:, loop[0]] = 9
    for token, following in zip(loop, [*loop[1:], loop[0]], strict=True):
        table[token] = 0
        table[token, following] = 40
    wrong = table.copy()
    wrong[loop[:2]] = table[loop[5]]
    settings = Speculation(num_draft_tokens=K)
    config = EngineConfig(max_batch=4, max_len=16_384, page_size=64, prefill_chunk=64, rounds=1)
    make = drafting("draft_model", settings, V)
    models = (bigram(logits, max_position=16_384) for logits in (table, wrong))
    return LLM(*models, make, "draft_model", tokenizer, settings, config)


if __name__ == "__main__":
    llm = model()
    llm.warmup()
    service = Service(jspec.AsyncEngine(llm), ["table"], keys=Keys([KEY]), chat_template=CHAT)
    run(service, listener("127.0.0.1", 0), ServerSettings(shutdown_timeout=5, log_level="warning"))
