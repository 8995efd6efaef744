"""A test that hangs fails by itself, and those behind it run."""

import subprocess
import sys
from pathlib import Path

HELPERS = Path(__file__).parent / "helpers"

CONFTEST = f"""
import sys
sys.path.insert(0, {str(HELPERS)!r})
import patience
patience.QUICK, patience.AGAIN = 1, 1

def pytest_configure(config):
    config.pluginmanager.register(patience.Patience(0.1))
"""

TESTS = """
import subprocess
import sys
import threading

def test_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_a_process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"]):
        raise AssertionError("first")

def test_behind_them():
    pass
"""


def test_tests_that_wait_for_ever_fail(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_waiting.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "2 failed, 1 passed" in run.stdout, run.stdout
    assert "test_a_lock - patience.TookTooLong" in run.stdout
