"""The shape of a tree of drafts: how many query tokens a verify pass reads, how deep they go, and how they branch."""

import dataclasses

from jspec._validation import is_int, require

MAX_NODES = 64  # a query token's ancestors are bits of two words
MAX_BRANCH = 16


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The shape of a tree of drafts, the same for every row and round.

    The tree of a row begins at its newest committed token, and grows best first: of the drafts of each level, the
    ``branch`` likeliest paths get up to ``branch`` children each, and of all drafts the likeliest paths are verified.

    Args:
      nodes: how many query tokens the target reads for each row in a round: the newest committed token and up to
        nodes - 1 drafts. A row's cache needs room for as many slots.
      depth: K, the most drafts of a path, and so the most that a round accepts.
      branch: how many drafts have the same parent at most, and how many of a level have children.

    Raises:
      ValueError: a number is out of range, or the tree can never have so many nodes.

    Example::

        tree = TreeShape(nodes=32, depth=6, branch=4)
        assert tree.most_drafts == 84  # of which the likeliest 31 are verified
    """

    nodes: int = 32
    depth: int = 6
    branch: int = 4

    def __post_init__(self):
        nodes, depth, branch = self.nodes, self.depth, self.branch
        ok = is_int(nodes) and 2 <= nodes <= MAX_NODES
        require(ok, "tree.nodes", nodes, f"an integer in 2..{MAX_NODES}: the newest token, and at least one draft")
        require(is_int(branch) and 1 <= branch <= MAX_BRANCH, "tree.branch", branch, f"an integer in 1..{MAX_BRANCH}")
        deepest = min(nodes - 1, 1 + MAX_NODES // branch)
        expected = f"an integer in 1..{deepest} with nodes={nodes} and branch={branch}"
        require(is_int(depth) and 1 <= depth <= deepest, "tree.depth", depth, expected)
        expected = f"at most {self.most_drafts + 1}, as many as depth={depth} and branch={branch} make"
        require(nodes <= self.most_drafts + 1, "tree.nodes", nodes, expected)

    @property
    def most_drafts(self) -> int:
        """How many drafts are drawn, of which the likeliest are verified."""
        return self.branch + (self.depth - 1) * self.branch**2

    @property
    def draft_slots(self) -> int:
        """How many slots of its own cache a draft head writes in a round behind those of committed tokens: of all drafts
        that have children."""
        return (self.depth - 1) * self.branch
