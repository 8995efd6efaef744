"""Flax (NNX) modules of the supported architectures and draft heads."""

from jspec.models.causal import causal_logits as causal_logits
from jspec.models.decoder import Decoder as Decoder
from jspec.models.params import abstract_params as abstract_params
from jspec.models.params import build as build
from jspec.models.params import build_head as build_head
from jspec.models.params import flat_params as flat_params
from jspec.models.params import init as init
