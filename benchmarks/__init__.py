"""Measurements of jspec, one program a file: ``python -m benchmarks.rounds.round``.

all.py, tables.py   every benchmark of one GPU; every table in README.md and docs/, from ``results/*.json``
rounds/             decode rounds and verify passes, beside the floors that memory and arithmetic set
kernels/            verification, small-batch products, experts, gated delta nets, prefill attention, sums over GPUs
peers/              vLLM and jspec on the same shapes, in turn on one card
engine/             an engine and its server under requests
soak/               half an hour of right and wrong requests beside a steady client
acceptance/         how many drafts of the shipped family are accepted
real/               real models, which a person names: a pair, a head, greedy text beside transformers'
host/               grammars, loading, and what a GPU holds of a model
report/             results as files, and the tables that are written from them
log/                what was measured and tried, one page a question; LOG.md is the contents
"""
