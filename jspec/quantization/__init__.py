"""Weight formats of four bits: how their codes and scales are stored.

groups.py  how many inputs share a scale in int4
int4.py    codes in groups of 128 inputs with a scale each
mxfp4.py   MXFP4, the format of gpt-oss' experts"""
