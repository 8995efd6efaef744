"""Configs of models, speculation and the engine: frozen dataclasses, validated when they are built.

model.py           a language model; model_fields.py has its fields, model_checks.py what they have to satisfy
layer.py           what one layer of it has of its own
rope.py            rotary position embedding
mla.py             multi-head latent attention
moe.py             mixture of experts
delta_net.py       gated delta nets
heads/             draft heads
speculation.py     settings of speculation
tree.py            the shape of a tree of drafts
engine.py          resources of the engine and shapes of its programs
sharding.py        tensor parallelism: how parameters are sharded
param_specs.py     declarations of parameters, from which names, shapes and bytes follow
decoder_params.py  the parameters of decoder layers and language models
eight_bit_maps.py  which maps have eight bits in a model of int4
tensor_names.py    names of tensors in checkpoints

Dimension letters have one meaning in code, comments and einsums everywhere in jspec:

    B rows of the batch              K drafts of a round              T = K + 1 query tokens of a verify pass
    S cache slots of a row           M pages of a row                 P slots of a page
    N attention heads                G key/value heads                R = N / G attention heads that share one
    H dimension of a head            D width of the model             F width of the MLP
    L layers                         V tokens of the vocabulary       Vd tokens of a draft vocabulary
    E numbers of a feature           C tokens of a prefill chunk
    We width of the embedding        Pe learned positions
    Wl width of per-layer inputs     Vl tokens of their table
    X experts of a layer             Y experts that a token goes through
    Fe width of an expert            Fs width of shared experts that are an MLP of their own
    Nk, Nv heads of keys and of values of a gated delta net, Dk, Dv their sizes, Wc taps of its convolution
    Ck, Cq ranks of latent attention Hn, Hr parts of a query that are not and are rotated        Hv size of a value
"""

from jspec.config.delta_net import DeltaNets as DeltaNets
from jspec.config.engine import MAX_POSITIONS as MAX_POSITIONS
from jspec.config.engine import NULL_PAGE as NULL_PAGE
from jspec.config.engine import EngineConfig as EngineConfig
from jspec.config.layer import LAYER_NORMS as LAYER_NORMS
from jspec.config.layer import OF_TARGET as OF_TARGET
from jspec.config.layer import LayerConfig as LayerConfig
from jspec.config.mla import Latent as Latent
from jspec.config.model import ModelConfig as ModelConfig
from jspec.config.model import count as count
from jspec.config.model_checks import QUANTIZATIONS as QUANTIZATIONS
from jspec.config.model_checks import STORED_QUANTIZATIONS as STORED_QUANTIZATIONS
from jspec.config.model_checks import require_part as require_part
from jspec.config.model_checks import require_quantization as require_quantization
from jspec.config.moe import Experts as Experts
from jspec.config.rope import ROPE_KINDS as ROPE_KINDS
from jspec.config.rope import Rope as Rope
from jspec.config.sharding import Shards as Shards
from jspec.config.sharding import shards_of as shards_of
from jspec.config.speculation import DRAFT_SAMPLINGS as DRAFT_SAMPLINGS
from jspec.config.speculation import VERIFY_RULES as VERIFY_RULES
from jspec.config.speculation import Speculation as Speculation
from jspec.config.tree import TreeShape as TreeShape
