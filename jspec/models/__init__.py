"""Flax (NNX) modules of the supported architectures."""

from jspec.models.causal import causal_logits as causal_logits
from jspec.models.decoder import Decoder as Decoder
from jspec.models.params import abstract_params as abstract_params
from jspec.models.params import build as build
from jspec.models.params import flat_params as flat_params
