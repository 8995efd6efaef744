"""The config of speculation: number of drafts, draft sampling, verification and prompt lookup."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

from jspec._validation import LARGEST_NUMBER, is_int, is_number, is_one_of, named_arguments, require
from jspec.config.tree import TreeShape

VERIFY_RULES = ("match", "rejection", "block")
DRAFT_SAMPLINGS = ("sample", "argmax", "coupled", "auto")

MAX_DRAFTS = 255  # a noise key has 8 bits for the index of the draft: see sampling/streams.py
MAX_NGRAM = 64  # tokens of a suffix; each of them costs a pass over the text in every round
# Default lengths of suffixes, shortest and longest, for prompt lookup alone and beside a drafter. A lookup that replaces
# the drafter's drafts has to be more certain.
NGRAM_ALONE, NGRAM_BESIDE = (1, 4), (4, 8)

# Every K that ``auto`` may choose, up to its limit. A program is compiled for each of them, so the list has gaps, in which
# a K would hardly be better than its neighbours.
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
DEFAULT_MAX_DRAFT_TOKENS = 8

# The trees that ``tree="auto"`` may choose, the largest and deepest one first.
AUTO_TREES = (TreeShape(nodes=32, depth=6, branch=4), TreeShape(nodes=8, depth=4, branch=2))

# Every number of tokens for each request that ``verify_budget="auto"`` may choose. A program is compiled for each.
BUDGETS = (1.5, 2, 3, 4)
MOST_OF_ALL = 0.8  # the largest budget, as a share of a round's tokens; above it hardly anything is saved
# Rounds of up to so many tokens have no budget, because their products take only the time of reading the weights; on an
# H200 that holds up to about 180 tokens (790 TFLOP/s over 4.3 TB/s). Under ``tree="auto"`` trees have no more.
NEVER_CUT = 128


@named_arguments(
    num_speculative_tokens="num_draft_tokens", rejection_sample_method="verify", draft_sample_method="draft_sampling"
)
@dataclasses.dataclass(frozen=True)
class Speculation:
    """The settings of speculation: number of drafts, draft sampling, verification and prompt lookup.

    Every combination that ``jspec.load`` accepts leaves the target's distribution unchanged.

    Args:
      num_draft_tokens: K, the drafts of a round. 0 is plain decoding, for which ``load`` does not load the draft. With
        ``auto`` the engine chooses K between calls to the device, from the acceptance so far and the measured cost of
        rounds, and chooses 0 where drafts would not pay. Alias ``num_speculative_tokens``.
      verify: the verification rule: ``match``, which accepts a draft that equals the target's own sample; ``rejection``
        (Leviathan et al., 2023; Chen et al., 2023); or ``block`` (Sun et al., 2024). ``auto`` is ``rejection``, and with a
        tree ``match``. Alias ``rejection_sample_method``.
      draft_sampling: how drafts are drawn from the drafter's distribution: ``sample``, with noise of their own;
        ``argmax``, its most probable token; ``coupled``, with the noise of the target's own sample, for ``match`` only;
        or ``auto``, which is argmax for requests whose temperature is below ``argmax_below`` and ``sample`` for others.
        It does not apply to n-gram drafts, which are looked up. Alias ``draft_sample_method``.
      argmax_below: the temperature below which ``auto`` takes the argmax. None takes the measured one of the drafting
        method, in docs/results/drafters.md.
      draft_temperature: the temperature of the drafter's distribution. None takes the request's. Any value is lossless.
      lookup: whether prompt lookup drafts beside a draft head or a draft model. A request whose newest ``ngram_min`` tokens
        or more occur earlier in its own text drafts what followed them there, in that round; in other rounds the drafter
        drafts. It pays where texts repeat much of their prompt, as in an edited file.
      ngram_min, ngram_max: the lengths of the shortest and the longest suffix that prompt lookup looks for, in tokens. None
        is 1 and 4 with ``draft="ngram"``, and 4 and 8 with ``lookup``; a longest below the shortest becomes as long.
      synthetic_acceptance: for benchmarks with random weights, whose models never agree. It is the probability that a
        draft is accepted if those before it were: one number for all drafts, or a tuple with one for each, and 0 for
        drafts past its end. A tuple of such tuples is for requests of several kinds: the last word of a request's key,
        modulo their number, selects the kind. The rule runs, and then its decision is replaced. The text does not follow
        the target then, so ``load`` refuses it.
      max_draft_tokens: the largest K that ``auto`` may choose. None takes 8, or as many as the drafter has weights for.
      verify_budget: n, how many query tokens the target reads in a round per request, on average over the batch. It reads
        the newest token of each request, and the drafts of the batch that are likeliest to be accepted. With ``auto`` the
        engine chooses n between calls, from the acceptance so far and the measured cost of rounds. None verifies every
        draft. The text keeps the target's distribution, but with ``rejection`` and ``block`` it depends on the other
        requests of the batch; so under ``reproducible=True`` each request gets n tokens.
      tree: the shape of trees of drafts, of EAGLE and EAGLE-3 heads and block drafters. A path is followed as far as it is
        the target's own seeded sample, so the rule is ``match``, and K is the tree's depth. None drafts chains. With
        ``auto`` the engine chooses between calls, as for K, among a tree and chains of 0 to ``num_draft_tokens`` drafts;
        ``num_draft_tokens="auto"`` beside it allows as many as ``max_draft_tokens`` says.

    Example::

        speculation = jspec.Speculation(num_draft_tokens=7, verify="block", draft_sampling="sample")
    """

    aliases: ClassVar[dict[str, str]]

    num_draft_tokens: int | Literal["auto"] = 4
    verify: Literal["auto", "match", "rejection", "block"] = "auto"
    draft_sampling: Literal["sample", "argmax", "coupled", "auto"] = "auto"
    argmax_below: float | None = None
    draft_temperature: float | None = None
    ngram_min: int | None = None
    ngram_max: int | None = None
    synthetic_acceptance: float | tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    max_draft_tokens: int | None = None
    verify_budget: float | Literal["auto"] | None = None
    lookup: bool = False
    tree: TreeShape | Literal["auto"] | None = None

    def __post_init__(self):
        if is_one_of(self.verify, ("auto",)):
            object.__setattr__(self, "verify", "rejection" if self.tree is None else "match")
        self._check_tree()
        self._check_num_draft_tokens()
        require(is_one_of(self.verify, VERIFY_RULES), "verify", self.verify, f"one of {', '.join(VERIFY_RULES)}")
        ok = is_one_of(self.draft_sampling, DRAFT_SAMPLINGS)
        require(ok, "draft_sampling", self.draft_sampling, f"one of {', '.join(DRAFT_SAMPLINGS)}")
        if self.draft_sampling == "coupled" and self.verify != "match":
            raise ValueError(
                f"draft_sampling='coupled' with verify={self.verify!r} is biased, because the accept test "
                "would see noise that chose the draft; use verify='match' or draft_sampling='sample'"
            )
        if self.draft_sampling == "coupled" and self.draft_temperature is not None:
            raise ValueError(
                f"draft_temperature={self.draft_temperature!r} has no place under draft_sampling='coupled', "
                "which follows the request's temperature; leave it out"
            )
        below = self.argmax_below
        expected = f"None or a number in 0..{LARGEST_NUMBER:g}"
        ok = below is None or (is_number(below) and 0 <= below <= LARGEST_NUMBER)
        require(ok, "argmax_below", below, expected)
        t = self.draft_temperature
        require(t is None or (is_number(t) and 0 <= t <= LARGEST_NUMBER), "draft_temperature", t, expected)
        self._check_lookup()
        self._check_synthetic_acceptance()
        n = self.verify_budget
        ok = n is None or (n == "auto" if isinstance(n, str) else is_number(n) and 1 < n <= MAX_DRAFTS + 1)
        expected = f"None, 'auto', or a number of tokens for each request, above 1 and at most {MAX_DRAFTS + 1}"
        require(ok, "verify_budget", n, expected)

    def width(self, rows: int) -> int:
        """How many query tokens the target reads in a round for each of ``rows`` rows. Rounds of fewer rows, whose trees may
        be larger, have no more in all."""
        tokens = max((b * tree.nodes for b in range(1, rows + 1) for tree in self.trees(b)), default=0)
        return max(self.most_draft_tokens + 1, -(-tokens // rows))

    def trees(self, rows: int) -> tuple[TreeShape, ...]:
        """The shapes of trees that a round of so many rows may have. Under ``auto`` there is one at most, the largest whose
        nodes take hardly more time than reading the weights."""
        if self.tree == "auto":
            return tuple(tree for tree in AUTO_TREES if rows * tree.nodes <= NEVER_CUT)[:1]
        return () if self.tree is None else (self.tree,)

    @property
    def auto(self) -> bool:
        """Whether the engine chooses K."""
        return self.num_draft_tokens == "auto" or self.tree == "auto"

    @property
    def most_draft_tokens(self) -> int:
        """K; under ``auto``, the largest K that may be chosen, the depth of trees among them."""
        return max([self.longest_chain, *(tree.depth for tree in self.trees(rows=1))])

    @property
    def longest_chain(self) -> int:
        """K of the longest chains of drafts."""
        if self.num_draft_tokens == "auto":
            return DEFAULT_MAX_DRAFT_TOKENS if self.max_draft_tokens is None else self.max_draft_tokens
        return self.num_draft_tokens

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Every K of chains that may be chosen, in ascending order."""
        most = self.longest_chain
        return (*(K for K in DRAFT_LENGTHS if most > K), most) if self.auto else (most,)

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """The lengths of the shortest and the longest suffix that prompt lookup looks for, in tokens."""
        shortest, longest = NGRAM_BESIDE if self.lookup else NGRAM_ALONE
        shortest = shortest if self.ngram_min is None else self.ngram_min
        return shortest, max(shortest, longest) if self.ngram_max is None else self.ngram_max

    def budgets(self, rows: int, K: int) -> tuple[int | None, ...]:
        """The verification budgets, in tokens, that a round of ``rows`` rows with K drafts each may have; None is all.

        Only None is useful where all tokens together take about the time of reading the weights.
        """
        n, every = self.verify_budget, rows * (K + 1)
        if n is None or K == 0:
            return (None,)
        if n == "auto":
            choices = [math.ceil(rows * share) for share in BUDGETS] if every > NEVER_CUT else []
            return (None, *(R for R in choices if R / every <= MOST_OF_ALL))
        R = math.ceil(rows * n)
        return (None if every <= R else R,)

    def for_each_request(self) -> "Speculation":
        """The same settings with n query tokens for each request, independent of the batch: n - 1 drafts, all verified.

        Under ``num_draft_tokens="auto"``, n bounds the K that may be chosen."""
        if not isinstance(self.verify_budget, int):
            return self
        most = min(self.most_draft_tokens, self.verify_budget - 1)
        if self.auto:
            return dataclasses.replace(self, max_draft_tokens=most, verify_budget=None)
        return dataclasses.replace(self, num_draft_tokens=most, verify_budget=None)

    def fixed(self, drafts: int | TreeShape) -> "Speculation":
        """The same settings with an integer K, or with trees of one shape, which leaves nothing to choose."""
        K, tree = (drafts.depth, drafts) if isinstance(drafts, TreeShape) else (drafts, self.tree)
        tree = None if tree == "auto" else tree
        return dataclasses.replace(self, num_draft_tokens=K, max_draft_tokens=None, tree=tree)

    def same_text_for_every_K(self, width: int | None, pins_shapes: bool = True) -> bool:
        """Whether a seed means one text whatever K is, where rounds have ``width`` query tokens: drafts only make it come
        sooner. Where shapes need not be pinned (``EngineConfig.pins_shapes``), any width and ``verify_budget`` does. A tree
        decides in which slots its drafts lie, and thus the last bits of sums over them."""
        coupled = self.verify == "match" and self.draft_sampling == "coupled" and self.tree is None
        return coupled and (not pins_shapes or (width is not None and self.verify_budget is None))

    def require_lossless(self):
        """Raise a ValueError for settings under which the text would not have the target's distribution."""
        if self.synthetic_acceptance is not None:
            raise ValueError(
                f"synthetic_acceptance={self.synthetic_acceptance!r} accepts drafts by chance and not by the target, so "
                "the text would not have the target's distribution; it is for the programs in benchmarks/, leave it out "
                "here"
            )

    def _check_tree(self):
        tree, K = self.tree, self.num_draft_tokens
        expected = "None or a jspec.TreeShape(nodes=.., depth=.., branch=..), or 'auto'"
        auto = is_one_of(tree, ("auto",))
        require(tree is None or auto or isinstance(tree, TreeShape), "tree", tree, expected)
        if tree is None:
            return
        expected = "'auto' or at least 1 with tree='auto', the most drafts of the chains to choose from"
        require(not auto or not is_one_of(K, (0,)), "num_draft_tokens", K, expected)
        depths = (Speculation.num_draft_tokens, tree.depth) if isinstance(tree, TreeShape) else (K,)
        for name, value, known, why in (
            ("num_draft_tokens", K, depths, "K is the depth of the tree"),
            ("verify", self.verify, ("match",), "accepting by p / q needs the law of a whole tree, which is not done"),
            (
                "draft_sampling",
                self.draft_sampling,
                ("auto", "coupled"),
                "children are ranked by the target's own noise",
            ),
            ("argmax_below", self.argmax_below, (None,), "children are ranked by the target's own noise"),
            ("draft_temperature", self.draft_temperature, (None,), "children are ranked by the target's own noise"),
            ("verify_budget", self.verify_budget, (None,), "nodes is how many tokens the target reads"),
            ("lookup", self.lookup, (False,), "what is looked up is a chain"),
            ("synthetic_acceptance", self.synthetic_acceptance, (None,), "a path is accepted by the target alone"),
        ):
            if not is_one_of(value, known):
                raise ValueError(f"{name}={value!r} has no place with a tree: {why}; leave it out, or leave tree out")
        if isinstance(tree, TreeShape):
            object.__setattr__(self, "num_draft_tokens", tree.depth)
        object.__setattr__(self, "draft_sampling", "coupled")

    def _check_num_draft_tokens(self):
        K, most = self.num_draft_tokens, self.max_draft_tokens
        ok = (isinstance(K, str) and K == "auto") or (is_int(K) and 0 <= K <= MAX_DRAFTS)
        require(ok, "num_draft_tokens", K, f"an integer in 0..{MAX_DRAFTS}, or 'auto'")
        ok = most is None or (is_int(most) and 1 <= most <= MAX_DRAFTS)
        require(ok, "max_draft_tokens", most, f"None or an integer in 1..{MAX_DRAFTS}")
        if most is not None and K != "auto":
            raise ValueError(
                f"max_draft_tokens={most!r} has no place with num_draft_tokens={K!r}, which leaves nothing to choose; "
                "leave it out or use num_draft_tokens='auto'"
            )

    def _check_lookup(self):
        lookup, lo, hi = self.lookup, self.ngram_min, self.ngram_max
        require(isinstance(lookup, bool), "lookup", lookup, "True or False")
        ok = not lookup or self.num_draft_tokens != 0
        fix = "False with num_draft_tokens=0, which drafts nothing, or num_draft_tokens of at least 1"
        require(ok, "lookup", lookup, fix)
        ok = lo is None or (is_int(lo) and 1 <= lo <= MAX_NGRAM)
        require(ok, "ngram_min", lo, f"None or an integer in 1..{MAX_NGRAM}")
        shortest = self.ngram_lengths[0]
        ok = hi is None or (is_int(hi) and shortest <= hi <= MAX_NGRAM)
        at_least = f"ngram_min, {shortest}" if lo is not None else f"the default of ngram_min, {shortest}"
        require(ok, "ngram_max", hi, f"None or an integer of at least {at_least}, and at most {MAX_NGRAM}")

    @property
    def acceptance_by_kind(self) -> tuple[tuple[float, ...], ...] | None:
        """``synthetic_acceptance`` as a tuple with the rates of each kind of request; None without it."""
        rates: Any = self.synthetic_acceptance
        if rates is None:
            return None
        rates = rates if isinstance(rates, tuple) else (rates,) * self.most_draft_tokens
        return rates if rates and all(isinstance(kind, tuple) for kind in rates) else (rates,)

    def _check_synthetic_acceptance(self):
        kinds, K = self.acceptance_by_kind or ((0,),), self.most_draft_tokens
        expected = f"None, a number in 0..1, a tuple of 1 to {K} of them, one for each draft, or a tuple of such tuples"
        ok = K == 0 or all(1 <= len(kind) <= K and all(is_number(r) and 0 <= r <= 1 for r in kind) for kind in kinds)
        require(ok, "synthetic_acceptance", self.synthetic_acceptance, expected)
