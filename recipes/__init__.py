"""The scripts that made the checkpoints shipped with jspec: corpus, tokenizer, training and export."""
