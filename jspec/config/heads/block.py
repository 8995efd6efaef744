"""The config of a block drafter: DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr or XPress."""

import dataclasses
from collections.abc import Mapping

from jspec._validation import is_int, require
from jspec.config import ModelConfig, count
from jspec.config.decoder_params import decoder_layers
from jspec.config.heads.auxiliary import FEATURE, AuxiliaryConfig
from jspec.config.heads.base import require_count
from jspec.config.heads.block_corrections import DominoConfig, LiLiCorrConfig
from jspec.config.param_specs import DRAFT_VOCAB, EMBED, VOCAB, Axis, Parameter, indices, linear, matrix, vector

RANK, GATE, CELL = Axis("Rm", "markov"), Axis("Dg", "gate"), Axis("Dc", "gate")
SIDES, TAPS, KERNELS = Axis("2", "sides"), Axis("Tc", "taps"), Axis("2TcGc", "kernels")
SELECTOR_RANK = Axis("Rs", "selector")
REFINED, INNER, SLOT = Axis("Rx", "refiner"), Axis("Fx", "refiner"), Axis("Ns", "slots")
MARKOVS = ("vanilla", "gated", "rnn")
CONFIDENCES = ("hidden", "markov")


@dataclasses.dataclass(frozen=True)
class BlockConfig(AuxiliaryConfig):
    """DFlash, DFlash2, JetSpec, DSpark, Domino, LiLiCorr, XPress (all of 2026): layers fill a block of mask tokens at once.

    The block is the newest committed token, its *anchor*, and mask tokens. Every layer attends to the *context*, the
    target's auxiliary hidden states of the tokens before the anchor, fused into ``[D]``, from which each layer computes
    its own keys and values. It attends to the block as well, in both directions or causally.

    Attributes:
      layers: the decoder layers. The vocabulary is the target's, V. A layer with a window W sees the W newest tokens of the
        context before the anchor and the whole block, unless ``windows_by_slot``; if it is causal, the W newest slots up to
        its own, unless ``windows_from_anchor``.
      draft_vocab_size: Vd, how many tokens the output head has logits for.
      target_hidden_size: Dt, width of the target's residual stream.
      aux_layers: which auxiliary hidden states the context joins: k is the residual stream after k layers of the target.
      block_size: slots of the block, the anchor's included.
      mask_token_id: the token that the other slots read.
      anchor_first: whether slot i of the block predicts the token behind it, so that the anchor's slot makes draft 0 and
        the block as many drafts as it has slots. If not, slot i > 0 predicts the token in its own place, and the anchor's
        slot none.
      causal: of each layer, whether a slot sees none of the slots behind it.
      markov: how each draft of a DSpark head depends on the one before it, whose embedding ``[Rm]`` is mapped to an addend
        of the logits: as it is (``vanilla``), times a gate of the hidden state and the embedding (``gated``), or by way of
        a recurrent cell with a state ``[Rm]`` (``rnn``). None in a DFlash head.
      markov_rank: Rm; 0 without ``markov``.
      confidence: the input of the confidence head: the hidden state of a slot (``hidden``), or that and the embedding of
        the draft before it (``markov``). None without a confidence head.
      own_embedding, own_head: whether the checkpoint has a token embedding and an output head. If not, the target's serve.
      conv_taps: Tc, over how many slots of a block each convolution of a DFlash2 head reaches, its own included
        (``jspec.models.heads.dflash2``). A LiLiCorr head may have them, too. 0 in other heads, as are the next three.
      conv_group: how many neighbouring numbers of the hidden state share what the hidden state adds to a kernel.
      selector_rank: Rs, of the candidate selector of a DFlash2 head, by which each draft depends on the one before it.
      candidates: how many tokens, the likeliest of each slot, the candidate selector or a LiLiCorr head chooses among.
      domino: the sizes of the recurrence of a Domino head, by which each draft depends on those before it; None in others.
      lilicorr: the sizes of the layers of a LiLiCorr head, which score the candidates of all slots; None in others.
      refiner_rank, refiner_ratio, refine_passes: Rx, of the refiner of an XPress head (``jspec.models.heads.refiner``), the
        inner size of its MLP in Rx, and how often it corrects the drafts of a block. 0 in other heads.
      windows_from_anchor: whether each slot of a causal layer with a window W sees the W newest tokens of the context before
        the anchor, and the block up to its own slot, as heads of the ``speculators`` package do.
      windows_by_slot: whether each slot of a layer with a window W that is not causal sees those of the W newest slots up to
        its own that are of the context, and the whole block, as heads of z-lab and of Model Optimizer do.

    Example::

        from jspec.config import ModelConfig

        layers = ModelConfig("LlamaForCausalLM", 32, 16, 32, 1, 2, 1, 8, 64)  # one layer, V = 32, D = 16
        dspark = BlockConfig(
            layers,
            draft_vocab_size=32,
            target_hidden_size=16,
            aux_layers=(1, 2),
            block_size=8,
            mask_token_id=31,
            anchor_first=True,
            causal=(False,),
            markov="vanilla",
            markov_rank=4,
        )
    """

    layers: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    anchor_first: bool
    causal: tuple[bool, ...]
    markov: str | None = None
    markov_rank: int = 0
    confidence: str | None = None
    own_embedding: bool = False
    own_head: bool = False
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    candidates: int = 0
    domino: DominoConfig | None = None
    lilicorr: LiLiCorrConfig | None = None
    refiner_rank: int = 0
    refiner_ratio: int = 0
    refine_passes: int = 0
    windows_from_anchor: bool = False
    windows_by_slot: bool = False

    def __post_init__(self):
        V, mask = self.layers.vocab_size, self.mask_token_id
        self.require_sizes()
        require_count("block_size", self.block_size, least=1 if self.anchor_first else 2)
        require(is_int(mask) and 0 <= mask < V, "mask_token_id", mask, f"in 0..{V - 1}")
        ordered = len(self.aux_layers) > 0 and self.has_ascending_aux_layers()
        require(ordered, "aux_layers", self.aux_layers, "layer ids of at least 0, ascending")
        layers = self.layers.num_layers
        each = len(self.causal) == layers and all(isinstance(flag, bool) for flag in self.causal)
        require(each, "causal", self.causal, f"True or False for each of {layers} layers")
        require(self.markov in (None, *MARKOVS), "markov", self.markov, f"None or one of {', '.join(MARKOVS)}")
        pairs = [(flag, W) for flag, W in zip(self.causal, self.layers.windows, strict=True) if W is not None]
        narrowest, B = min((W for flag, W in pairs if not flag), default=0), self.block_size
        for name, may, expected in (
            ("windows_from_anchor", any(flag for flag, _ in pairs), "False, because no causal layer has a window"),
            (
                "windows_by_slot",
                narrowest >= B,
                f"False, unless layers that are not causal have windows of at least {B}",
            ),
        ):
            value = getattr(self, name)
            require(isinstance(value, bool) and (may or not value), name, value, expected)
        rank = self.markov_rank
        fits = is_int(rank) and (0 < rank < 2**31 if self.markov is not None else rank == 0)
        require(fits, "markov_rank", rank, "an integer of at least 1 with a Markov head, 0 without")
        known = (None, *CONFIDENCES) if self.markov is not None else (None, "hidden")
        require(self.confidence in known, "confidence", self.confidence, f"one of {known}")
        if self.is_dflash2 or self.lilicorr is not None:
            self._require_candidates()
        if self.domino is not None:
            self._require_domino(self.domino)
        sizes = self.refiner_rank, self.refiner_ratio, self.refine_passes
        parts = (self.markov, self.confidence, self.domino, self.lilicorr)
        others = self.is_dflash2 or any(part is not None for part in parts)
        whole = all(is_int(size) and 0 <= size < 2**31 for size in sizes)
        fits = whole and (all(sizes) and not others if any(sizes) else True)
        expected = "three integers of at least 1 in a head with nothing else beside its layers, or 0"
        require(fits, "refiner_rank, refiner_ratio, refine_passes", sizes, expected)

    def _require_candidates(self):
        """Raise a ValueError unless the sizes of convolutions and candidates fit each other and the layers."""
        D, V, Vd, B = self.layers.hidden_size, self.layers.vocab_size, self.draft_vocab_size, self.block_size
        kind, own = ("a DFlash2 head", 1) if self.lilicorr is None else ("a LiLiCorr head", 0)
        taps = 1 if own or self.conv_taps or self.conv_group else 0
        for name, size, least, most in (
            ("conv_taps", self.conv_taps, taps, B),
            ("conv_group", self.conv_group, taps, D),
            ("selector_rank", self.selector_rank, own, own * (2**31 - 1)),
            ("candidates", self.candidates, 1, V),
        ):
            require(is_int(size) and least <= size <= most, name, size, f"an integer in {least}..{most} in {kind}")
        divides = not taps or D % self.conv_group == 0
        require(divides, "conv_group", self.conv_group, f"a divisor of the hidden size, {D}")
        require(self.markov is None, "markov", self.markov, f"None in {kind}, which chooses among candidates")
        require(Vd == V, "draft_vocab_size", Vd, f"{V}: {kind} has the target's whole vocabulary")
        require(bool(own) or not self.anchor_first, "anchor_first", self.anchor_first, f"False in {kind}")

    def _require_domino(self, domino: DominoConfig):
        """Raise a ValueError unless drafts depend on each other by nothing else, and the anchor's slot drafts."""
        for name, expected in (("markov", None), ("lilicorr", None), ("is_dflash2", False), ("anchor_first", True)):
            value = getattr(self, name)
            require(value == expected, name, value, f"{expected} in a Domino head")
        fits = domino.uncorrected < self.block_size
        require(fits, "uncorrected", domino.uncorrected, f"below {self.block_size}, the slots of the block")

    @property
    def is_dflash2(self) -> bool:
        """Whether the layers have convolutions and a candidate selector chooses the drafts."""
        return self.lilicorr is None and any((self.conv_taps, self.conv_group, self.selector_rank, self.candidates))

    @property
    def method(self) -> str:
        if self.refiner_rank:
            return "xpress"
        return "dflash" if self.markov is None else "dspark"

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def trained_drafts(self) -> int:
        return self.max_drafts

    @property
    def dimensions(self) -> Mapping[str, int]:
        D, Rm = self.layers.hidden_size, self.markov_rank
        # Dg is the size of the inputs of gate and confidence head, and Dc of those of the recurrent cell.
        markov = {"Rm": Rm, "Dg": D + Rm, "Dc": D + 2 * Rm}
        groups = D // self.conv_group if self.conv_group else 0
        refiner = {"Rx": self.refiner_rank, "Fx": self.refiner_rank * self.refiner_ratio, "Ns": self.block_size}
        sizes = {
            **super().dimensions,
            **markov,
            **refiner,
            "Tc": self.conv_taps,
            "Gc": groups,
            "Rs": self.selector_rank,
        }
        domino = {} if self.domino is None else self.domino.dimensions(D)
        lilicorr = {} if self.lilicorr is None else self.lilicorr.dimensions(self.block_size, self.candidates)
        return {**sizes, **domino, **lilicorr}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        c = self.layers
        return (
            *self.embedding,
            *linear("fuse_in", {"fc": EMBED}, FEATURE, quantization=c.quantization_of("fuse_in")),
            vector("context_norm.weight", "hidden_norm.weight", EMBED),
            *decoder_layers(c, indices(0, c.num_layers)),
            *self._convolution_parameters,
            vector("norm.weight", "norm.weight", EMBED),
            *self.output_head,
            *self._markov_parameters,
            *self._selector_parameters,
            *(() if self.domino is None else self.domino.parameters(c.quantization_of)),
            *(() if self.lilicorr is None else self.lilicorr.parameters(c.hidden_size)),
            *self._refiner_parameters,
            *self._confidence_parameters,
        )

    @property
    def _markov_parameters(self) -> tuple[Parameter, ...]:
        if self.markov is None:
            return ()
        kind, states = self.layers.quantization_of, Axis("3Rm", "markov")
        cell = {
            "vanilla": (),
            "gated": linear(
                "markov.gate", {"markov_head.gate_proj": RANK}, GATE, bias=True, quantization=kind("markov.gate")
            ),
            "rnn": linear(
                "markov.cell", {"markov_head.joint_proj": states}, CELL, bias=True, quantization=kind("markov.cell")
            ),
        }[self.markov]
        return (
            matrix("markov.embedding", "markov_head.markov_w1.weight", VOCAB, RANK),
            *linear("markov.out", {"markov_head.markov_w2": DRAFT_VOCAB}, RANK, quantization=kind("markov.out")),
            *cell,
        )

    @property
    def _convolution_parameters(self) -> tuple[Parameter, ...]:
        """The convolutions of the layers. They are small and never quantised."""
        if not self.conv_taps:
            return ()
        copies, parameters = indices(0, self.layers.num_layers), []
        for name in ("attention_conv", "mlp_conv"):
            base = f"layers.{{}}.{name}.base_kernel"
            parameters.append(Parameter(base, {base: SIDES}, (TAPS, EMBED), copies))
            projection = f"layers.{{}}.{name}.kernel_projection"
            parameters += linear(projection, {projection: KERNELS}, EMBED, copies)
        return tuple(parameters)

    @property
    def _selector_parameters(self) -> tuple[Parameter, ...]:
        """The candidate selector of a DFlash2 head, never quantised."""
        if not self.is_dflash2:
            return ()
        theirs = "candidate_selector."
        return (
            matrix("selector.predecessors", f"{theirs}predecessor_codebook", VOCAB, SELECTOR_RANK),
            matrix("selector.successors", f"{theirs}successor_codebook", VOCAB, SELECTOR_RANK),
            *linear("selector.project", {f"{theirs}hidden_projection": SELECTOR_RANK}, EMBED),
        )

    @property
    def _refiner_parameters(self) -> tuple[Parameter, ...]:
        """The refiner of an XPress head, never quantised."""
        if not self.refiner_rank:
            return ()
        theirs = "refiner_head."
        return (
            matrix("refiner.embedding", f"{theirs}token_embed.weight", VOCAB, REFINED),
            *linear("refiner.read", {f"{theirs}down_h": REFINED, f"{theirs}down_g": REFINED}, EMBED),
            *linear("refiner.join", {f"{theirs}in_proj": REFINED}, Axis("3Rx", "refiner")),
            Parameter("refiner.mix", {f"{theirs}mix_l": REFINED}, (SLOT, SLOT)),
            *linear("refiner.gate_up", {f"{theirs}mlp_gate": INNER, f"{theirs}mlp_up": INNER}, REFINED),
            *linear("refiner.down", {f"{theirs}mlp_down": REFINED}, INNER),
            *linear("refiner.out", {f"{theirs}readout": DRAFT_VOCAB}, REFINED),
        )

    @property
    def _confidence_parameters(self) -> tuple[Parameter, ...]:
        """Weight and bias of the confidence head, never quantised: one output channel, computed in float32."""
        if self.confidence is None:
            return ()
        read = EMBED if self.confidence == "hidden" else GATE
        return linear("confidence", {"confidence_head.proj": Axis("1", "one")}, read, bias=True)

    @property
    def summary(self) -> str:
        block = f"{'causal ' if all(self.causal) else ''}block of {self.block_size}, {count(self.max_drafts, 'draft')}"
        parts = [count(self.layers.num_layers, "layer"), block]
        if self.markov is not None:
            parts.append(f"{self.markov} Markov head of rank {self.markov_rank}")
        if self.domino is not None:
            parts.append(f"Domino states of {self.domino.state_size}")
        if self.conv_taps:
            parts.append(f"convolutions over {self.conv_taps} slots")
        if self.candidates:
            scores = "selector" if self.lilicorr is None else "LiLiCorr scores"
            parts.append(f"{scores} of {self.candidates} candidates")
        if self.refiner_rank:
            parts += [f"refiner of rank {self.refiner_rank}", count(self.refine_passes, "refinement")]
        aux = f"auxiliary layers {', '.join(map(str, self.aux_layers))}"
        return ", ".join([*parts, self.vocabulary_summary, aux])
