"""Three questions about checkpoints: why are few drafts accepted, is a target what it should be, and is it exact?

``diagnose`` checks a target and its draft, measures acceptance, and gives one verdict.

A draft head with one wrong setting still drafts, but badly, and its checkpoint often does not state the right setting. So
the head is tried with each alternative on texts that the target generates: with auxiliary hidden states from one layer
below and one layer above, and with its output fed back before and after its final norm.

``prove_exact`` counts the texts and the bits that depend on how a text comes about.

``compare_with_reference`` has transformers and jspec read and write the same texts, and says where they first differ.

diagnosis.py   ``diagnose``: from checks and measurements to the verdict
checks.py      checks of configs, tokenizers and weights
variants.py    the alternative settings of a head
trials.py      acceptance of a head on given texts, without the engine
rounding.py    acceptance with rounded weights or a rounded cache, and without
comparison.py  ``compare_with_reference``: from both sides' readings to figures, and where the difference begins
reference.py   what transformers computes
under_test.py  what jspec computes
exact.py       ``prove_exact``: completes prompts in all ways that should change nothing
exact_http.py  the same of a server
texts.py       how well two models predict a user's own texts
figures.py     how far apart logits, hidden states and texts are, and what counts as equal
report.py      prints a diagnosis or a comparison, and a report of both that can be pasted into a bug
command.py     ``jspec doctor``
"""

from jspec.doctor.checks import Check as Check
from jspec.doctor.comparison import Comparison as Comparison
from jspec.doctor.comparison import compare_with_reference as compare_with_reference
from jspec.doctor.diagnosis import Diagnosis as Diagnosis
from jspec.doctor.diagnosis import diagnose as diagnose
from jspec.doctor.exact import Difference as Difference
from jspec.doctor.exact import Exactness as Exactness
from jspec.doctor.exact import prove_exact as prove_exact
from jspec.doctor.exact_http import prove_exact_over_http as prove_exact_over_http
from jspec.doctor.report import show as show
from jspec.doctor.rounding import RoundingCost as RoundingCost
from jspec.doctor.texts import TextFigures as TextFigures
from jspec.doctor.variants import Trial as Trial
from jspec.text.files import read_prompts as read_prompts
