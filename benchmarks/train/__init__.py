"""Training: pretrain_gpt.py with and without our switch, our trainer, memory, Llama-3 1B."""
