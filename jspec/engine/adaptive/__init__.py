"""Chooses how many drafts a round makes, and how many of them are verified, where these are "auto".

controller.py        chooses both before each call
cost_table.py        seconds of a round by batch size, drafts and query tokens
draft_selection.py   selects the drafts that are verified under a verification budget
"""
