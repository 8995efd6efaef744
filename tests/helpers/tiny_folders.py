"""Sizes of the tiny checkpoints in the fixture ``folders``, and of an engine for them."""

V, EOS = 264, 1  # six ids more than the tokenizer has
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": EOS,
}
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
