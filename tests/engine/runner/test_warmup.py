"""What is said while a model warms up. ``test_engine.py`` has what runs."""

from types import SimpleNamespace
from typing import Any

from jspec.engine.runner.warmup import WarmupProgress


def test_programs_are_counted_to_a_known_total():
    first, second = programs = [SimpleNamespace(name=name, compiled=False, calls=0) for name in ("prefill", "decode")]
    progress: Any = WarmupProgress(programs, runs=2)  # pyright: ignore[reportArgumentType]
    said = [str(progress)]
    for program, field, value in (
        *((second, "compiled", True), (second, "calls", 1), (first, "compiled", True)),  # it ran for what another takes
        *((first, "calls", 2), (second, "calls", 2), (progress, "measuring", True)),
    ):
        setattr(program, field, value)
        said.append(str(progress))
    assert said == [
        "compiling 0 of 2 programs (prefill)",
        *["compiling 1 of 2 programs (prefill)"] * 2,
        "running 0 of 2 programs (prefill)",
        "running 1 of 2 programs (decode)",
        "all 2 programs have run",
        "measuring the costs of rounds",
    ]
