"""Why are so few drafts accepted? ``diagnose`` checks a target and its draft, measures, and gives one verdict.

A draft head that is read with one wrong setting still drafts, but badly, and its checkpoint often does not say which
setting is right. So the head is tried with each alternative, in texts that the target writes: with auxiliary hidden
states from one layer below and one layer above, and with its output fed back before and after its final norm.
"""

from jspec.doctor.checks import Check as Check
from jspec.doctor.diagnosis import Diagnosis as Diagnosis
from jspec.doctor.diagnosis import diagnose as diagnose
from jspec.doctor.diagnosis import read_prompts as read_prompts
from jspec.doctor.report import show as show
from jspec.doctor.variants import Trial as Trial
