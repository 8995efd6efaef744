"""Kernels on trial: right, and timed by ``benchmarks.layer``, but not used by jspec until they beat what it does."""
