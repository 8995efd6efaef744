"""``ReplaceableWeights``: the methods of ``jspec.LLM`` that give it new weights."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from jspec.updates.named import Names
from jspec.updates.update import ModelWeights, WeightUpdate


class ReplaceableWeights:
    """Methods of ``jspec.LLM`` that write new weights in the place of those of before. Any thread may call them.

    Example::

        from jspec.models import flat_params

        llm = jspec.load("path/to/target")
        weights = {name: 1.01 * array for name, array in flat_params(llm.target).items()}
        print(llm.update_weights(weights, names="jspec", version="a little more").seconds)
        llm.restore()
    """

    _weights: ModelWeights

    def update_weights(
        self,
        weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        *,
        draft: Mapping[str, Any] | None = None,
        version: int | str | None = None,
        names: Names = "huggingface",
        atomic: bool = False,
        wait: bool = True,
        recompute: bool = False,
    ) -> WeightUpdate:
        """Generate with new weights from now on, written into the memory of those of before; no program of the engine is
        compiled again.

        Cached pages and snapshots of texts, what was learned of the drafts' acceptance, and what ``logits`` computes with
        are of the new weights, too. Every array keeps its dtype and its place on one or several devices. Weights in int8,
        FP8 or int4 are rounded on the device, as ``jspec-convert`` does it on the host.

        Args:
          weights: the target's, ``[out, in]`` as in checkpoints, in float32, bfloat16 or float16: JAX arrays, on the devices
            of the model for speed, or NumPy's. A mapping has all of them and is looked at whole, so that nothing has changed
            if an error is raised. Pairs of name and array are a stream: a parameter is written once all that fills it has
            come, and until the last one came every call raises a RuntimeError that says ``weights incomplete``. None leaves
            the target as it is.
          draft: those of the draft model or draft head, a mapping. What a draft head has from its target stays so.
          version: what ``Result.weights_versions`` says of texts from now on; None is the number of updates until now.
          names: ``huggingface`` for the names of a checkpoint of this architecture, in any layout that ``load`` reads, or
            ``jspec`` for those of parameters, as in converted folders.
          atomic: whether all new weights are made beside those of before, which takes their memory twice, so that an error
            of the device or a stream that ends early changes nothing either.
          wait: whether requests that are under way end first. If not, they go on with the new weights and the keys and
            values of the old ones; ``Result.weights_versions`` says from which token on. After ``pause("abort")`` there are
            none, and after ``pause("keep")`` it has to be False. A stream that does not wait needs such a pause.
          recompute: whether those that go on have the keys and values of their texts computed anew, by the new weights: the
            next tokens are those that these weights give behind the text so far. It costs as much as prompts of that length.

        Raises:
          ValueError: a weight is missing, unknown, of another shape or dtype or not finite, or the target's format is none
            that weights are rounded to.
          TypeError: what is no array of JAX or NumPy.
          RuntimeError: another update is under way, the model is asleep or closed, or its devices belong to several
            processes.
        """
        return self._weights.update(weights, draft, version, names, atomic, wait, recompute)

    def update_weights_from(
        self, folder: str | os.PathLike, *, version: int | str | None = None, wait: bool = True, recompute: bool = False
    ) -> WeightUpdate:
        """``update_weights`` with the target's weights from a checkpoint folder or a GGUF file, which are stored as those of
        the model are. They are read twice: first to look at all of them. With ``wait=False`` the engine has to be paused;
        ``recompute`` as for ``update_weights``.

        Raises:
          ValueError: the folder holds another model, stores its weights in another way, or has a file that is damaged or
            numbers that are not finite. The weights of before stand.
        """
        return self._weights.load(folder, version, wait, recompute)

    def restore(self, *, wait: bool = True, recompute: bool = False) -> WeightUpdate:
        """Have the weights of target and draft again that the model was loaded with, from its folders; ``wait`` and
        ``recompute`` as for ``update_weights_from``."""
        return self._weights.load(None, None, wait, recompute)
