"""Rounds and passes of a target on a GPU with random weights, beside their floors."""
