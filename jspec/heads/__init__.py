"""What a trained draft head is: one frozen dataclass for each kind, validated when it is built.

A draft head drafts for one target. It reads the target's hidden states, and it may borrow the target's embedding or
output head. The configs here describe draft heads as ``jspec.config.ModelConfig`` describes a language model. Their
dimension letters are those of ``jspec.config``, and five more:

    E   size of a feature: how many numbers of the target one slot of the draft head reads
    Vd  draft vocabulary: how many of the V tokens the draft head can propose
    Dt  width of the target, where the draft head has a width D of its own
    W   width of the state of an MLP speculator
    Rm  rank of the Markov head of a DSpark head
"""

from jspec.heads.base import EMBEDDING as EMBEDDING
from jspec.heads.base import DraftConfig as DraftConfig
from jspec.heads.base import HeadConfig as HeadConfig
from jspec.heads.block import BlockConfig as BlockConfig
from jspec.heads.eagle import EagleConfig as EagleConfig
from jspec.heads.eagle3 import AUX_CONVENTIONS as AUX_CONVENTIONS
from jspec.heads.eagle3 import NORM_OUTPUTS as NORM_OUTPUTS
from jspec.heads.eagle3 import Eagle3Config as Eagle3Config
from jspec.heads.eagle3 import default_aux_layers as default_aux_layers
from jspec.heads.medusa import MedusaConfig as MedusaConfig
from jspec.heads.mlp import MLPConfig as MLPConfig
from jspec.heads.mtp import MTPConfig as MTPConfig
from jspec.heads.mtp import mtp_layers as mtp_layers
from jspec.heads.pard import PardConfig as PardConfig
