"""A reduced draft vocabulary: ``d2t`` and ``t2d`` on disk, ``draft_ids`` as a parameter.

``d2t`` holds offsets, int64 ``[Vd]``: row r of the output head is token r + d2t[r] of the target. ``t2d`` is bool
``[V]``, whether a token has a row. ``draft_ids`` is int32 ``[V]``, the row of each token or -1."""

import numpy as np

from jspec.checkpoints.layout import Derived, derived
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import Tensor

D2T, T2D = "d2t", "t2d"
MAX_VOCABULARY = 2**24  # no tokenizer has more; bounds the work that a hostile config can ask for


def draft_ids(folder: str, d2t: Tensor, t2d: Tensor | None, rows: int, vocab_size: int) -> Derived:
    """``draft_ids`` in the place of ``d2t``; ``folder`` is for messages.

    Raises:
      Refusal: a row is no token of the target, two rows are one token, or ``t2d`` disagrees.
    """
    if vocab_size > MAX_VOCABULARY:
        raise Refusal(f"{folder}/config.json: vocab_size={vocab_size}: expected at most {MAX_VOCABULARY}")
    targets = np.arange(rows) + _offsets(folder, d2t, rows)
    outside = np.flatnonzero((targets < 0) | (targets >= vocab_size))
    if outside.size:
        row = int(outside[0])
        raise Refusal(
            f"{folder}/{d2t.file}: d2t puts draft token {row} at token {targets[row]}, outside the target's vocabulary of "
            f"{vocab_size}"
        )
    ids = np.full(vocab_size, -1, np.int32)
    ids[targets] = np.arange(rows)  # of two rows with one token, the later stays
    lost = np.flatnonzero(ids[targets] != np.arange(rows))
    if lost.size:
        row = int(lost[0])
        other = ids[targets[row]]
        raise Refusal(
            f"{folder}/{d2t.file}: d2t puts draft tokens {row} and {other} both at token {targets[row]} of the target"
        )
    if t2d is not None:
        _check_members(folder, t2d, ids)
    return derived(d2t, ids)


def require_identity(folder: str, d2t: Tensor, rows: int):
    """Raise unless ``d2t`` of a head that knows the whole vocabulary leaves every token where it is."""
    moved = np.flatnonzero(_offsets(folder, d2t, rows))
    if moved.size:
        raise Refusal(
            f"{folder}/{d2t.file}: d2t moves {moved.size} tokens, first {moved[0]}, although the head has a row for each "
            f"of the target's {rows} tokens; expected offsets of 0"
        )


def offsets(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``d2t`` and ``t2d`` of ``draft_ids``."""
    targets = np.flatnonzero(ids >= 0)
    d2t = np.empty(targets.size, np.int64)
    d2t[ids[targets]] = targets - ids[targets]
    return d2t, ids >= 0


def _offsets(folder: str, d2t: Tensor, rows: int) -> np.ndarray:
    if d2t.dtype not in ("int64", "int32") or d2t.shape != (rows,):
        raise Refusal(
            f"{folder}/{d2t.file}: tensor {D2T!r} is {d2t.dtype} {list(d2t.shape)}, expected int64 {[rows]}, an offset for "
            "each row of the output head"
        )
    return d2t.read()


def _check_members(folder: str, t2d: Tensor, ids: np.ndarray):
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
