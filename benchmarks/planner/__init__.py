"""Plans and work lists, on one CPU core."""
