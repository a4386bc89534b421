"""Text files, tokenizers, and packing into Megatron's indexed data."""
