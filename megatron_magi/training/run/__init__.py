"""The training loop, what it steps over and what it writes down."""
