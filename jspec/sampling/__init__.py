"""What a request asks for, the law it makes of logits, where noise comes from, and the verification rules."""
