"""What a maintainer runs: documentation made from code and records, and checks."""
