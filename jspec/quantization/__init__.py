"""Weight formats of four bits: how their codes and scales are stored.

int4.py    codes in groups of 128 inputs with a scale each
mxfp4.py   MXFP4, the format of gpt-oss' experts"""
