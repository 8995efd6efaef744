"""What a request asks for, the distribution it makes of logits, where noise comes from, and the verification rules."""
