"""Times the steps of vLLM's engine in which every row is decoding, with random weights. It runs in an environment that has
vLLM, whose V1 engine and names it uses, and imports nothing else but Python's own library:

    python of_vllm.py JOB

JOB is the JSON object that ``benchmarks.peers.children.vllm_job`` makes. What was measured is printed as
``benchmarks.peers.children`` reads it. The time of a step is the wall time between what two steps in a row return,
vLLM's scheduler included."""

import dataclasses
import json
import os
import random
import statistics
import sys
import time

WARM_UP = 24  # tokens of each row, before the timed runs of a batch
SETTLING = 4  # steps after prefill that are not timed
RUNS = 2


def main():
    job = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and its processes print is for the log

    def say(**line):
        print(json.dumps(line), file=lines, flush=True)

    try:
        engine = engine_of(job, say)
        for rows in job["batches"]:
            say(rows=rows, **timed(engine, rows, job))
    except Exception as error:
        say(reason=f"{type(error).__name__}: {error}")
        raise


def engine_of(job, say):
    """vLLM's engine with the model of ``job``."""
    import torch
    import vllm
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    say(about={"vllm": vllm.__version__, "torch": torch.__version__})
    rows, drafts = job["batches"], job["drafts"]
    options = {
        "model": job["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": job["prompt"] + job["new"] + 64,
        "max_num_seqs": max(rows),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "compilation_config": {
            "cudagraph_capture_sizes": sorted({n * width for n in rows for width in (1, drafts + 1)})
        },
    }
    if "language_model_only" in fields_of(EngineArgs):
        options["language_model_only"] = True
    if job["method"] is not None:
        if "synthetic_acceptance_rates" not in fields_of(SpeculativeConfig):
            raise ValueError(
                f"vLLM {vllm.__version__} has no synthetic acceptance, and accepts no draft of random weights"
            )
        rates = [job["acceptance"] ** (position + 1) for position in range(drafts)]
        how = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        draft = {} if job["draft"] is None else {"model": job["draft"]}
        options["speculative_config"] = {"method": job["method"], "num_speculative_tokens": drafts, **draft, **how}
    return vllm.LLM(**options).llm_engine


def fields_of(config):
    return {field.name for field in dataclasses.fields(config)}


def timed(engine, rows, job):
    """Milliseconds of a step, and tokens that it gave each row; or why no step was timed."""
    decode(engine, rows, job, min(WARM_UP, job["new"]))
    steps = [step for _ in range(RUNS) for step in decode(engine, rows, job, job["new"])]
    if not steps:
        return {"reason": f"at most {SETTLING} steps had all {rows} rows decoding; the cache may have no room for them"}
    milliseconds, tokens = zip(*steps, strict=True)
    return {"ms": statistics.median(milliseconds), "tokens": statistics.mean(tokens) / rows, "steps": len(steps)}


def decode(engine, rows, job, new):
    """Milliseconds and tokens of each step in which all rows decoded, of ``rows`` random prompts."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for row in range(rows):
        prompt = [random.randrange(job["vocabulary"]) for _ in range(job["prompt"])]
        sampling = SamplingParams(
            max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine.add_request(f"{time.monotonic_ns()}-{row}", {"prompt_token_ids": prompt}, sampling)
    found, last, before = [], 0.0, 0  # ``before``: rows that the step before gave tokens
    while engine.has_unfinished_requests():
        counts = [len(output.outputs[0].token_ids) for output in engine.step()]
        now, live = time.perf_counter(), sum(count > 0 for count in counts)
        if live == before == rows:
            found.append((1e3 * (now - last), sum(counts)))
        if counts:
            last, before = now, live
    return found[SETTLING:]


if __name__ == "__main__":
    main()
