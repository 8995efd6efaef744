"""Checkpoints by their names on the Hugging Face hub: in its local cache, or downloaded after a consent that says the size.

``folders.local_checkpoints`` is the way in: it takes what a user gave, folders and names, and returns folders. Nothing is
downloaded unless the user said so. What a hub answers is untrusted: names of files and commits become paths only after
they were checked, and every downloaded file is compared with the size and the digest of the hub's listing before it gets
its name.

names.py      ``Repository``: a name and a revision, from ``org/name@revision``
cache.py      finds whole checkpoints in the local cache
listing.py    ``Listing``: the files of a repository at a commit, as the hub lists them
selection.py  which of these files jspec reads
consent.py    the sizes in words, the question on a terminal, and the room on the disk
transfer.py   downloads files, and goes on where an earlier download ended
errors.py     what the user does about each error of the hub
folders.py    from what the user gave to folders
"""
