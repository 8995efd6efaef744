"""Formats of stored weights: how numbers and scales are stored, and what they stand for.

formats.py      the formats by their names, without an array library
codes.py        codes of four to eight bits in groups: how they are packed, and what they stand for
levels.py       scales of groups that are products of two numbers
int4.py         rounds weights to codes of four bits in groups of 128 inputs
fp8_block.py    rounds weights to numbers of eight bits in blocks of 128 x 128
tables.py       tables of sixteen numbers that codes of four bits name: NF4 and FP4
nvfp4.py        NVFP4, codes of four bits with a scale for each 16 inputs and a number for each output channel
mxfp4.py        MXFP4, codes of four bits with a power of two for each 32 inputs
mxfp4_pairs.py  MXFP4 as gpt-oss' experts have it, in an order of their own
unpack_pairs.py what the latter stand for
weight.py       what a weight stands for in any of them"""
