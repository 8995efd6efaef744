"""Multi-head latent attention (DeepSeek-V2, 2024).

norm_rope_write_kv.py   norms and RoPE of new latents, and their write into the KV cache
absorb_queries.py       absorbed queries: queries multiplied into the space of latents, and RoPE
attention.py            attention of absorbed queries over latents
project_values.py       values of heads from sums of latents
up_project.py           the up-projection: keys and values of all heads from latents in pages
prefill.py              attention of prefill, over up-projected keys and values"""
