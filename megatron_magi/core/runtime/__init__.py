"""L4: runs plans. Dispatch, the staged attention function, agreement between ranks."""
