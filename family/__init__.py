"""How the checkpoints that ship with jspec were made: corpus, tokenizer, training and export."""
