"""Gated delta nets, the recurrent layers of Qwen3-Next and Qwen3.5 (Yang et al., "Gated Delta Networks", 2024).

projections.py        from the input projections of a layer to queries, keys, values, decays and betas
convolution.py        the short causal convolution, and its columns in decoding and in prefill
state.py              what a layer keeps of its rows, and which rows and segments of prompts a pass reads
reference.py          the recurrence token by token, and the verify pass with exact rollback, which are the specification
verify.py             the verify pass as a kernel
chunked.py            many tokens in chunks of 64, for prefill
prepare.py            kernels for what chunks contribute to prefill without regard to the state
prefill.py            prefill of segments of several prompts, by kernels or by ``chunked.py``
recur.py              convolution and recurrence of a layer, over the rows of a pass or over whole texts

A layer computes, from its normed input y and for each value head:

    qkv, z, b, a = projections of y
    q, k, v = silu(convolution(qkv))                q and k divided by their lengths, q divided by sqrt(Dk), in float32
    g = -exp(A_log) softplus(a + dt_bias)           the logarithm of the decay, at most 0
    beta = sigmoid(b)                               how much of a value is written
    S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q
    output = projection of (norm(o) * weight * silu(z))

Everything between the convolution and o is in float32, in prefill, decoding and verify passes alike.

There are two orders of sums: prefill's chunks, which lie on multiples of 64 of the position, and a verify pass's token after
token. Neither depends on who shares a pass, nor the first on how a prompt is cut if passes begin at these multiples, nor
the second on T.

Besides the dimension letters of ``jspec/config/__init__.py``, this package has

    Nk key heads, which queries share             Nv value heads, each with an S of its own
    Dk size of a key                              Dv size of a value
    W taps of the convolution                     Cc channels of the convolution: 2 Nk Dk + Nv Dv
    Bs rows of the state, of which a pass has B   Tm the most query tokens that a verify pass may have
    Q = 64 tokens of a chunk

Value head n reads the queries and keys of key head n // (Nv / Nk)."""
