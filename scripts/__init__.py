"""Programs that are run by their paths; a package for `tools`, which reads `published_jobs`."""
