"""Draft heads on disk: one file per public layout, ``kinds`` to tell them apart, ``stored`` for converted folders."""
