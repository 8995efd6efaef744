"""Greedy text of a real model in float32, with and without drafts, beside transformers' on the same device.

    python -m benchmarks.real.greedy path/to/target path/to/draft              # 20 prompts, 64 tokens each
    python -m benchmarks.real.greedy path/to/target path/to/draft --prompts 3  # fewer

It counts answers that are equal token for token, and writes how many into benchmarks/results/ or ``--json``. Where one is
not, it prints the token at which they part and by how much transformers' own logits of both tokens differ there: equal
within rounding, or wrong."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jspec
from benchmarks.real.prompts import prompts
from benchmarks.real.real_models import name_of
from benchmarks.report import results


def of_transformers(target: str, asked: Sequence[Sequence[int]], new: int):
    """Its answers, token ids, and the logits of each of their tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device).eval()
    plain = {"do_sample": False, "repetition_penalty": 1.0, "temperature": None, "top_p": None, "top_k": None}
    for ids in asked:
        whole = torch.tensor([list(ids)], device=device)
        with torch.no_grad():
            found = model.generate(
                whole,
                attention_mask=torch.ones_like(whole),
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                **plain,
            )
        yield found.sequences[0, len(ids) :].tolist(), [step[0] for step in found.logits]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    names = {"target": name_of(args.target), "draft": name_of(args.draft)}
    result = results.begin("greedy", names | {"prompts": args.prompts, "new": args.new, "smoke": False})
    asked, answers = [], {}
    params = jspec.SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    for name, draft in (("plain", None), ("with drafts", args.draft)):
        with jspec.load(args.target, draft, dtype="float32", max_batch=args.prompts, max_len=1536) as llm:
            texts = llm.chat([one.messages for one in prompts(args.prompts)], params)
            assert isinstance(texts, list)
            answers[name] = [list(text.token_ids) for text in texts]
            asked = [list(text.prompt_token_ids) for text in texts]
    equal = dict.fromkeys(answers, 0)
    for i, (wanted, logits) in enumerate(of_transformers(args.target, asked, args.new)):
        for name, found in answers.items():
            if found[i] == wanted:
                equal[name] += 1
                continue
            at = next(j for j, (a, b) in enumerate(zip(found[i], wanted, strict=True)) if a != b)
            gap = float(logits[at][wanted[at]] - logits[at][found[i][at]])
            print(
                f"prompt {i}, {name}: token {at} is {found[i][at]} and not {wanted[at]}, whose logit is {gap:.2g} higher"
            )
    result.measured.update(equal)
    results.write(result, args.json or results.RESULTS / f"greedy-{names['draft']}-{result.day}.json")
    print("; ".join(f"{name}: {count} of {len(asked)} answers are transformers'" for name, count in equal.items()))
    return 0 if set(equal.values()) == {len(asked)} else 1


if __name__ == "__main__":
    sys.exit(main())
