"""The dimensions of the target and of its draft model.

Both are meant for CPUs of a few cores. There the time of a pass depends on the number of layers as much as on the bytes
of the weights, so both models have few and wide layers.
"""

from jspec.config import ModelConfig

# 9.5 million parameters.
TARGET = ModelConfig(
    architecture="llama",
    vocab_size=2048,
    hidden_size=320,
    intermediate_size=1280,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=1024,
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)

# 1.2 million parameters. With fewer than two layers it could not repeat a phrase from earlier in the text: that takes an
# induction head, which is made of attention heads in two layers (Olsson et al., 2022).
DRAFT = ModelConfig(
    architecture="llama",
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    max_position=1024,
    tie_embeddings=True,
    bos_token_id=0,
    eos_token_ids=(0,),
)
