"""Files of untrusted checkpoints, read without running anything in them.

folder.py         a folder from which only its own files can be opened
json_files.py     parses JSON files, within limits of size and depth
fields.py         typed reading of a JSON object
tensor.py         one tensor on disk, in any file format
fp8_numbers.py    FP8 tensors, of which no number is NaN
ranges.py         parts of an array in a file
pickles.py        ``torch.save`` files, read without unpickling them in this process
unpickle/         the process that interprets them
tiktoken.py       vocabularies of tiktoken, which are refused
refusal.py        the exceptions ``Refusal`` and ``Mismatch``
"""
