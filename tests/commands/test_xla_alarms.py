"""XLA's alarms about slow compilations do not reach standard error; everything else does."""

import itertools
import os
import subprocess
import sys
import textwrap

import pytest
from children import environment

from jspec.commands.xla_alarms import without_alarms

BOX = """
********************************
[Compiling module jit_decode for {}] Very slow compile? If you want to file a bug, run with envvar XLA_FLAGS=--xla_dump_to=.
********************************
"""
FOLDING = """Constant folding an instruction is taking > {}s:

  %reduce.3 = f32[8]{{0}} reduce(%a, %b), dimensions={{1}}, to_apply=%add

This isn't necessarily a bug; constant-folding is inherently a trade-off between compilation time and speed at runtime.

If you'd like to file a bug, run with envvar XLA_FLAGS=--xla_dump_to=. and attach it
"""
ALARMS = [*map(BOX.format, ("CPU", "GPU")), *map(FOLDING.format, (1, 16))]
ALARMS += [f"The operation took 2m16.546238113s\n{alarm}" for alarm in ALARMS]
HEADS = ["E1128 11:19:56.799769   13754 slow_operation_alarm.cc:73] "]
HEADS += ["2025-03-19 07:30:02.045318: E external/xla/xla/service/slow_operation_alarm.cc:140] "]
OTHERS = [
    "E1128 11:19:57.000000   13754 cuda_executor.cc:1228] INTERNAL: CUDA Runtime error\n",
    "thread '<unnamed>' panicked at src/lib.rs:1:2:\ncalled `Option::unwrap()` on a `None` value\n",
    "[Compiling module x] of another's\n",
    "no line end",
]


def test_alarms_are_left_out(capfd):
    """Of every kind, before and behind lines of others."""
    with without_alarms():
        for alarm, head, other in itertools.product(ALARMS, HEADS, OTHERS[:3]):
            os.write(2, (head + alarm).encode())
            os.write(2, other.encode())
        os.write(2, (HEADS[0] + ALARMS[0] + OTHERS[3]).encode())
    os.write(2, b"later")
    assert capfd.readouterr().err == "".join(OTHERS[:3]) * len(ALARMS) * len(HEADS) + OTHERS[3] + "later"


@pytest.mark.parametrize(("end", "code"), [("os.abort()", -6), ("os._exit(3)", 3), ("sys.exit(4)", 4)])
def test_the_last_words_of_a_process_are_told(end, code):
    """And those that Python writes, at once and in their order."""
    program = f"""
        import os, sys
        from jspec.commands.xla_alarms import without_alarms
        with without_alarms():
            os.write(2, {(HEADS[0] + ALARMS[0]).encode()!r})
            print("Python", file=sys.stderr)
            os.write(2, b"F1128 pjrt.cc:7] Check failed: ok\\n")
            {end}
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, "Python\nF1128 pjrt.cc:7] Check failed: ok\n")


def test_a_closed_stream_stays_closed():
    program = (
        "import os; os.close(2)\nfrom jspec.commands.xla_alarms import without_alarms\nwith without_alarms(): pass"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, timeout=60)
