"""An assistant of Gemma 4 as drafter: K passes of a small head over the target's own keys and values."""

import dataclasses

from jspec.drafting.base import Context
from jspec.drafting.drawing import FromNewestFeature
from jspec.models.gathered_view import GatheredView
from jspec.models.heads.assistant import AssistantHead
from jspec.models.kv_cache import PagedView, View


@dataclasses.dataclass(frozen=True)
class Assistant(FromNewestFeature):
    """An assistant. It attends to the slots 0 .. length - 2, which are all that the target has computed of committed tokens:
    slot length - 1 may hold keys of a refused draft. It reads the target's embedding and cache."""

    head: AssistantHead

    def propose(self, state, context: Context):
        newest, room = context.length[:, None] - 1, self.room(context)
        view: View = PagedView(context.table, newest - 1, (room > 0)[:, None])
        if (shards := getattr(self.target, "shards", None)) is not None:
            view = GatheredView(view, getattr(self.target, "peers", None), shards)
        # For each layer of the assistant, what the layer of the target has cached to whose keys and values it attends.
        caches = [context.cache[source] for source in self.head.config.sources(self.target.config)]

        def next_pass(hidden, token, i):
            del i  # the position is the same for all drafts
            normed, hidden = self.head(self.target.embed(token), hidden, newest, caches, view)
            return hidden, self.head.logits(normed)

        hidden, logits = next_pass(context.newest_feature, context.tokens_at(newest), 0)
        _, proposal = self.drawing(context).chain(logits, hidden, next_pass, room)
        return state, proposal
