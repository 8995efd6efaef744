"""Multi-head latent attention (DeepSeek-V2, 2024).

attention.py            attention over the latents themselves
absorb_queries.py       queries with the up-projection of keys absorbed, and their rotary embedding
norm_rope_write_kv.py   norms, rotary embedding and the write of new latents
up_project.py           keys and values of all heads from latents in pages
prefill.py              attention of prefill, over up-projected keys and values
"""
