"""Training of draft heads: ``jspec train``, and ``OnPolicyTrainer`` beside a target that changes.

command.py          the command and its arguments
run.py              one training run, from its settings to the exported head
methods.py          config, objective and initial weights of a new head
initial_weights.py  parameters that do not start at random, and draft vocabularies
objectives.py       what an objective is, and the loss that the optimiser differentiates
eagle.py            objectives of EAGLE, EAGLE-3, P-EAGLE and MTP
stages.py           objectives of MLP speculator and Medusa
block.py            objectives of block drafters: DFlash and DSpark
losses.py           the target's distributions, and cross-entropies against them
ttt_attention.py    attention of training-time test: a round from every slot of a text
block_attention.py  attention of blocks at many anchors
data.py             corpora from files
loop.py             the training loop
data_parallel.py    training with a sharded target
on_policy.py        training of an engine's own head on the texts that it generates
acceptance.py       acceptance length, measured by the engine
checkpoints.py      training states on disk
report.py           losses.csv, losses.png and figures.json
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.train.on_policy import OnPolicyTrainer as OnPolicyTrainer


def __getattr__(name: str) -> Any:  # as in ``jspec``: the arguments of the command need no JAX
    if name == "OnPolicyTrainer":
        from jspec.train.on_policy import OnPolicyTrainer

        return OnPolicyTrainer
    raise AttributeError(f"module 'jspec.train' has no attribute {name!r}")
