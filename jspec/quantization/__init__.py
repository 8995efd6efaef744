"""Weight formats in which groups of inputs share a scale: how their numbers and scales are stored.

groups.py     how many inputs share a scale in int4 and fp8_block
int4.py       codes of four bits in groups of 128 inputs with a scale each
fp8_block.py  FP8 numbers in groups of 128 inputs with a scale each
mxfp4.py      MXFP4, the format of gpt-oss' experts"""
