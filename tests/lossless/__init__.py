"""Losslessness is tested, not claimed: emitted text follows exactly the target's distribution, and drafts are accepted
exactly as often as theory says. ``distributions`` predicts, ``rounds`` (rules alone) and ``table_model`` (whole steps)
play, ``statistics`` compares."""
