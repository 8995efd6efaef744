"""Weights as kernels read them: tiles of stored numbers, unpacked to floats that tensor cores multiply.

unpack.py        weights of eight or four bits as bfloat16
table_codes.py   codes of a table of sixteen numbers as bfloat16
mxfp4_pairs.py   MXFP4 weights of gpt-oss as bfloat16
head_maps.py     the up-projection of latents to keys and values of each head
tiles.py         tiles of any weight, unpacked in kernels"""
