"""Parts of `check_jobs.py`."""
