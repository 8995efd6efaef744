"""Single kernels and products: are they right, and how long do they take?"""
