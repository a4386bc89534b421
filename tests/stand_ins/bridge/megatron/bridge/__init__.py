"""A stand-in for what `use_magi` hooks of Megatron-Bridge's Qwen3-VL, on Megatron's GPTModel.

It says nothing about Bridge's own code, which the same test runs where Bridge is installed.
"""
