"""An assistant of Gemma 4 as drafter: K passes of a small head over the target's own keys and values."""

import dataclasses

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Drawn, Setup, Stateless
from jspec.drafting.drawing import Drawing
from jspec.models.gathered_view import GatheredView
from jspec.models.heads.assistant import AssistantHead
from jspec.models.kv_cache import PagedView, View
from jspec.models.protocols import Target


@dataclasses.dataclass(frozen=True)
class Assistant(Drawn, Stateless):
    """An assistant. It attends to the slots 0 .. length - 2, which are all that the target has computed of committed tokens:
    slot length - 1 may hold keys of a refused draft.

    After a prompt of one token, for which the target has computed nothing yet, the first round drafts nothing.

    Attributes:
      head: the assistant.
      target: the target, whose embedding and cache it reads.
      sources: for each layer of the assistant, the layer of the target whose keys and values it attends to.
      speculation: K, and how drafts are drawn.
    """

    head: AssistantHead
    target: Target
    sources: tuple[int, ...]
    speculation: Speculation

    aux_layers = ()

    @classmethod
    def build(cls, setup: Setup):
        head: AssistantHead = setup.draft
        return cls(head, setup.target, head.config.sources(setup.target_config), setup.speculation)

    def propose(self, state, context: Context):
        drawing = Drawing(self.speculation, context, self.head.config.method, None)
        newest = context.length[:, None] - 1
        room = jnp.where(context.length > 1, context.room, 0)
        view: View = PagedView(context.table, newest - 1, (room > 0)[:, None])
        if (shards := getattr(self.target, "shards", None)) is not None:
            view = GatheredView(view, getattr(self.target, "peers", None), shards)
        caches = [context.cache[source] for source in self.sources]

        def next_pass(hidden, token, i):
            del i  # the position is the same for all drafts
            normed, hidden = self.head(self.target.embed(token), hidden, newest, caches, view)
            return hidden, self.head.logits(normed)

        hidden, logits = next_pass(context.newest_feature, context.tokens_at(newest), 0)
        _, proposal = drawing.chain(logits, hidden, next_pass, room)
        return state, proposal
