"""A byte-level GPT trained on the Python standard library; see ``examples/train_gpt.py``."""
