"""L4: plans at work. Dispatch, the staged attention function, agreement between ranks."""
