"""jspec inside of other libraries, which install it as they are.

tunix.py   the rollout engine of google-tunix
"""
