"""AOT cache: executables and measured costs on disk, shared by successive processes.

files.py         files of the cache, in the folder of JAX's compilation cache
executables.py   compiled programs
costs.py         measured costs of rounds
fingerprint.py   the cache key of an engine's programs
"""
