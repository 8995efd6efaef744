"""Figures of real models: folders that a person names, none of which are here.

prompts.jsonl    sixty prompts of three kinds: code, chat, and edits of code
prompts.py       reads them
real_models.py   a target with a draft model, lookup, or a head: accepted drafts, and tokens a second
greedy.py        greedy text beside transformers' on the same device, in float32
answers.py       a target's answers to many questions, which a head is trained on
questions.py     these questions"""
