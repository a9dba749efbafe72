"""The text side of a base model: tokenizer, chat template, incremental detokenization."""
