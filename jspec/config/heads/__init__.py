"""Configs of draft heads: one frozen dataclass for each kind, validated when it is built.

A draft head drafts for one target. It reads the target's hidden states, and it may use the target's embedding or output
head.

base.py       protocols, the base of heads with decoder layers, shared checks
auxiliary.py  the base of heads that fuse auxiliary hidden states: eagle3.py and block.py
eagle.py      EAGLE and EAGLE-2
eagle3.py     EAGLE-3 and P-EAGLE
mtp.py        multi-token prediction layers
block.py      DFlash, DFlash2, JetSpec, DSpark, XPress, and with block_corrections.py Domino and LiLiCorr
assistant.py  assistants of Gemma 4
mlp.py        MLP speculator
medusa.py     Medusa heads
pard.py       PARD, a language model with mask tokens

Dimension letters are those of ``jspec.config``, and thirteen more:

    E   size of a feature: how many numbers of the target one slot of the draft head reads
    Vd  draft vocabulary: how many of the V tokens the draft head can propose
    Dt  width of the target, where the draft head has a width D of its own
    W   width of the state of an MLP speculator
    Rm  rank of the Markov head of a DSpark head
    Nc  clusters of tokens in the output head of an assistant, of Vc tokens each
    Tc  slots over which a convolution of a DFlash2 head reaches
    Gc  groups of numbers that share the computed part of its kernels
    Rs  rank of the candidate selector of a DFlash2 head
    Rx  rank of the refiner of an XPress head
    Fx  width of its MLP
    Ns  slots of a block, which it mixes

Those of Domino and LiLiCorr heads are in block_corrections.py.
"""

from jspec.config.heads.assistant import AssistantConfig as AssistantConfig
from jspec.config.heads.base import EMBEDDING as EMBEDDING
from jspec.config.heads.base import DraftConfig as DraftConfig
from jspec.config.heads.base import HeadConfig as HeadConfig
from jspec.config.heads.block import BlockConfig as BlockConfig
from jspec.config.heads.eagle import EagleConfig as EagleConfig
from jspec.config.heads.eagle3 import AUX_CONVENTIONS as AUX_CONVENTIONS
from jspec.config.heads.eagle3 import NORM_OUTPUTS as NORM_OUTPUTS
from jspec.config.heads.eagle3 import Eagle3Config as Eagle3Config
from jspec.config.heads.eagle3 import default_aux_layers as default_aux_layers
from jspec.config.heads.medusa import MedusaConfig as MedusaConfig
from jspec.config.heads.mlp import MLPConfig as MLPConfig
from jspec.config.heads.mtp import MTPConfig as MTPConfig
from jspec.config.heads.mtp import mtp_layers as mtp_layers
from jspec.config.heads.pard import PardConfig as PardConfig
