"""A reduced draft vocabulary of Vd of the target's V tokens: ``d2t`` and ``t2d`` on disk, ``draft_ids`` as a parameter.

``d2t``, int64 ``[Vd]``, holds offsets: draft token i is token ``i + d2t[i]`` of the target.
``t2d``, bool ``[V]``, says whether a token of the target is in the draft vocabulary.
``draft_ids``, int32 ``[V]``, holds the draft token of each token of the target, or -1 if there is none.

Example: a draft vocabulary of tokens 0, 3 and 4 of a target with V = 5 has ``d2t = [0, 2, 2]``,
``t2d = [True, False, False, True, True]`` and ``draft_ids = [0, -1, -1, 1, 2]``."""

import numpy as np

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Derived, Tensor, derived

D2T, T2D = "d2t", "t2d"
MAX_VOCABULARY = 2**24  # no tokenizer has more; bounds the work that a hostile config can ask for


def with_draft_ids(
    folder: str, tensors: dict[str, Tensor], draft_vocab_size: int, vocab_size: int
) -> dict[str, Tensor]:
    """``tensors``, with the parameter ``draft_ids``, int32 ``[V]``, in the place of ``d2t``.

    Args:
      folder: the checkpoint, for messages.
      tensors: name -> tensor, for every tensor in the files. Without ``d2t`` nothing is replaced, and nothing of a draft
        head with all tokens, whose offsets have to be 0.
      draft_vocab_size: Vd.
      vocab_size: V.

    Raises:
      Refusal: a draft token lies outside the target's vocabulary, two draft tokens are the same token of the target,
        ``t2d`` contradicts ``d2t``, or a draft head with all tokens has other offsets than 0.
    """
    if D2T in tensors and draft_vocab_size < vocab_size:
        return {**tensors, D2T: _draft_ids(folder, tensors[D2T], tensors.get(T2D), draft_vocab_size, vocab_size)}
    if D2T in tensors:
        _require_identity(folder, tensors[D2T], draft_vocab_size)
    return dict(tensors)


def with_public_vocabulary(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``tensors`` (public name -> array) in the form of the public layouts: ``draft_ids``, int32 ``[V]``, which are under
    ``d2t``, become ``d2t`` and ``t2d``, int64 ``[Vd]`` and bool ``[V]``."""
    if D2T not in tensors:
        return dict(tensors)
    ids = tensors[D2T]
    targets = np.flatnonzero(ids >= 0)
    d2t = np.empty(targets.size, np.int64)
    d2t[ids[targets]] = targets - ids[targets]
    return {**tensors, D2T: d2t, T2D: ids >= 0}


def _draft_ids(folder: str, d2t: Tensor, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> Derived:
    """``draft_ids`` as a tensor that stands in the place of ``d2t``; ``t2d`` is None if the files lack it."""
    if vocab_size > MAX_VOCABULARY:
        raise Refusal(f"{folder}/config.json: vocab_size={vocab_size}: expected at most {MAX_VOCABULARY}")
    draft_tokens = np.arange(draft_vocab_size)
    targets = draft_tokens + _offsets(folder, d2t, draft_vocab_size)
    outside = np.flatnonzero((targets < 0) | (targets >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise Refusal(
            f"{folder}/{d2t.file}: d2t puts draft token {first} at token {targets[first]}, outside the target's "
            f"vocabulary of {vocab_size}"
        )
    ids = np.full(vocab_size, -1, np.int32)
    ids[targets] = draft_tokens  # if two draft tokens are the same token of the target, the later one stays
    lost = np.flatnonzero(ids[targets] != draft_tokens)
    if lost.size:
        first = int(lost[0])
        other = ids[targets[first]]
        raise Refusal(
            f"{folder}/{d2t.file}: d2t puts draft tokens {first} and {other} both at token {targets[first]} of the target"
        )
    if t2d is not None:
        _require_same_members(folder, t2d, ids)
    return derived(d2t, ids)


def _require_identity(folder: str, d2t: Tensor, vocab_size: int):
    """Raise a ``Refusal`` unless all offsets are 0; for a draft head whose draft vocabulary is the target's own."""
    moved = np.flatnonzero(_offsets(folder, d2t, vocab_size))
    if moved.size:
        raise Refusal(
            f"{folder}/{d2t.file}: d2t moves {moved.size} tokens, first {moved[0]}, although the output head of this draft "
            f"head has an output channel for each of the target's {vocab_size} tokens; expected offsets of 0"
        )


def _offsets(folder: str, d2t: Tensor, draft_vocab_size: int) -> np.ndarray:
    """The values of ``d2t``, ``[Vd]``, after a check of its dtype and shape."""
    if d2t.dtype not in ("int64", "int32") or d2t.shape != (draft_vocab_size,):
        raise Refusal(
            f"{folder}/{d2t.file}: tensor {D2T!r} is {d2t.dtype} {list(d2t.shape)}, expected int64 {[draft_vocab_size]}, "
            "an offset for each output channel of the output head"
        )
    return d2t.read()


def _require_same_members(folder: str, t2d: Tensor, ids: np.ndarray):
    """Raise a ``Refusal`` unless ``t2d`` marks exactly the tokens that have a draft token in ``ids``."""
    if t2d.dtype != "bool" or t2d.shape != ids.shape:
        raise Refusal(
            f"{folder}/{t2d.file}: tensor {T2D!r} is {t2d.dtype} {list(t2d.shape)}, expected bool {list(ids.shape)}, one "
            "entry for each token of the target"
        )
    members, reached = t2d.read(), ids >= 0
    wrong = np.flatnonzero(members != reached)
    if wrong.size:
        raise Refusal(
            f"{folder}/{t2d.file}: t2d marks {members.sum()} tokens and d2t reaches {reached.sum()}; they first differ at "
            f"token {wrong[0]}"
        )
