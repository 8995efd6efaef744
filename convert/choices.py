"""What options of ``jspec-convert`` may be. This imports nothing, so that the command answers before it loads JAX."""

VERIFICATIONS = ("shapes", "logits")
JSPEC, COMPRESSED = "jspec", "compressed-tensors"  # formats of OUT
