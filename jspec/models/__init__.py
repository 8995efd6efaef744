"""Flax (NNX) modules of the supported architectures and draft heads.

decoder.py         the decoder of all families
decoder_layer.py   a decoder layer: attention, MLP and the residual stream
attention.py       grouped-query attention of a layer
layers.py          linear maps, norms, activations and rotary frequencies
mla.py             multi-head latent attention
delta_net.py       gated delta nets, in the place of attention
moe.py             a mixture of experts
gathered_view.py   a view of a cache in shards, for heads that every device has
products.py        which kernel multiplies each map of a model, and why not another
one_order.py       which kernel of a model has not one order of sums for any number of tokens
per_layer.py       per-layer inputs: numbers of each token that one layer alone reads
heads/             draft heads
cache_pools.py     what each layer keeps of the texts that it has read: pools of pages, recurrent states
kv_cache.py        the views that read and write the paged KV cache
ragged_view.py     the view of rows with different numbers of query tokens
quantization.py    weights of eight and of four bits
w8a8.py            inputs of products in eight bits, of drafters and of targets
sharding.py        modules over the devices of a mesh
params.py          from a flat dict of params to a module, and back
placement.py       the devices of a model that is being built, where they were named
flatten.py         from a module to a list of arrays, and back
causal.py          the forward pass over entire texts
protocols.py       the protocols that engine, drafters and training expect of a model"""

from jspec.models.causal import causal_logits as causal_logits
from jspec.models.decoder import Decoder as Decoder
from jspec.models.params import abstract_params as abstract_params
from jspec.models.params import build as build
from jspec.models.params import build_head as build_head
from jspec.models.params import flat_params as flat_params
from jspec.models.params import init as init
