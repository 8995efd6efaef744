"""Diagnosis of low acceptance: ``diagnose`` checks a target and its draft, measures acceptance, and gives one verdict.

A draft head with one wrong setting still drafts, but badly, and its checkpoint often does not state the right setting. So
the head is tried with each alternative on texts that the target generates: with auxiliary hidden states from one layer
below and one layer above, and with its output fed back before and after its final norm.

diagnosis.py  ``diagnose``: from checks and measurements to the verdict
checks.py     checks of configs, tokenizers and weights
variants.py   the alternative settings of a head
trials.py     acceptance of a head on given texts, without the engine
report.py     prints a diagnosis
"""

from jspec.doctor.checks import Check as Check
from jspec.doctor.diagnosis import Diagnosis as Diagnosis
from jspec.doctor.diagnosis import diagnose as diagnose
from jspec.doctor.diagnosis import read_prompts as read_prompts
from jspec.doctor.report import show as show
from jspec.doctor.variants import Trial as Trial
