"""The two shapes. Both run on small CPUs, where a pass costs by layers as much as by bytes: few, wide layers."""

from jspec.config import ModelConfig

# 9.5 million weights.
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

# 1.2 million weights; two layers are the fewest that can copy an earlier phrase (Olsson et al., 2022, induction heads).
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
