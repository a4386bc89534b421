"""Training: pretrain_gpt.py with and without the flag, and Llama-3 1B."""
